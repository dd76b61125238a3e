/* What the page does by itself: replays, announcements to screen readers, the view of a phone. */

const live = Object.assign(document.createElement("div"), { id: "mm-live", className: "mm-sr", role: "status" });
const played = new Set(); // kinds whose opening replay has played by itself
const visible = (selector) => [...document.querySelectorAll(selector)].find((one) => one.offsetParent);
let following = false;
let planned = false;

function update() {
  planned = false;
  for (const recorded of document.querySelectorAll("[data-recording]:not([data-on])")) {
    recorded.dataset.on = "";
    const read = JSON.parse(recorded.dataset.recording), replay = new Replay(recorded.closest(".mm-result"), read);
    const { plays, settings: { kind } } = read;
    if (!plays || played.has(kind) || matchMedia("(prefers-reduced-motion: reduce)").matches) continue;
    played.add(kind);
    replay.toggle();
  }
  const said = visible(".mm-talk")?.parentElement.querySelector(".mm-say")?.textContent;
  if (said !== undefined && said !== live.textContent) live.textContent = said;
  follow();
}

const follow = () => following && visible(".mm-out")?.scrollIntoView({ block: "start" });

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

// On a phone, the race comes before the controls, and stays in view from the tap until the next tap or scroll.
addEventListener("click", ({ target }) => {
  if (target.closest(".mm-jump")) visible(".mm-side").scrollIntoView({ block: "start" });
  following = innerWidth <= 640 && Boolean(target.closest(".mm-go, .mm-ask"));
  follow();
});
for (const kind of ["wheel", "touchmove"]) addEventListener(kind, () => { following = false; }, { passive: true });
