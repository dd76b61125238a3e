/* What the page does by itself: replays, announcements to screen readers, the view of a phone. */

const live = element("div", { id: "mm-live", class: "mm-sr", role: "status", "aria-live": "polite" });
const played = new Set(); // kinds whose opening replay has played by itself
let following = false;
let planned = false;

function update() {
  planned = false;
  for (const section of document.querySelectorAll(".mm-result:not([data-on])")) {
    const recorded = section.querySelector("[data-recording]");
    if (!recorded) continue;
    section.dataset.on = "";
    const read = JSON.parse(recorded.dataset.recording), replay = new Replay(section, read), { kind } = read.settings;
    if (!read.plays || played.has(kind) || matchMedia("(prefers-reduced-motion: reduce)").matches) continue;
    played.add(kind);
    replay.toggle();
  }
  const said = [...document.querySelectorAll(".mm-say")].filter((one) => one.parentElement.offsetParent).map((one) => one.textContent);
  if (said.length && said[0] !== live.textContent) live.textContent = said[0];
  follow();
}

function follow() {
  const results = [...document.querySelectorAll(".mm-out")].find((one) => one.offsetParent);
  if (following && results) results.scrollIntoView({ block: "start" });
}

function start() {
  document.documentElement.lang ||= "en";
  document.body.append(live, lostNote);
  new MutationObserver(() => {
    if (!planned) requestAnimationFrame(update);
    planned = true;
  }).observe(document.body, { childList: true, subtree: true, characterData: true });
  update();
  check();
}

if (document.body) start();
else addEventListener("DOMContentLoaded", start);

// On a phone, the race comes before the controls.
document.addEventListener("click", (event) => {
  if (!event.target.closest(".mm-jump")) return;
  [...document.querySelectorAll(".mm-side")].find((one) => one.offsetParent).scrollIntoView({ block: "start" });
});

// On a phone, the results stay in view from the tap until the next tap or scroll.
document.addEventListener("click", (event) => {
  following = innerWidth <= 640 && Boolean(event.target.closest(".mm-go, .mm-ask"));
  follow();
});
for (const kind of ["wheel", "touchmove"]) document.addEventListener(kind, () => { following = false; }, { passive: true });
