/* Elements, texts and the clipboard. */

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function shape(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const percent = (share) => share == null ? "" : share < 0.001 ? "< 0.1%" : share > 0.999 ? "> 99.9%" : `${(100 * share).toFixed(1)}%`;
const seconds = (time) => `${time.toFixed(2)} s`;
const count = (number, noun) => `${number || "no"} ${noun}${number === 1 ? "" : "s"}`;
const visible = (text) => text.trim() || JSON.stringify(text);

/** Press a button of the page's tab that an element belongs to. */
function press(name, at) {
  at.closest(".mm-side").querySelector(name).click();
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { class: "mm-sr" }); // addresses other than loopback need HTTPS for the clipboard
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("copy");
}
