/* Images and videos: buttons, paste and drop, previews of what the browser cannot show. */

const media = () => [...document.querySelectorAll(".mm-media")].find((one) => one.offsetParent); // of the visible tab

/** Press a button of the page's tab that an element belongs to. */
const press = (name, at) => at.closest(".mm-side").querySelector(name).click();

/** Hand the files of an event to the upload of the visible tab, if it takes them. */
function give(event, files) {
  const input = media()?.querySelector("input[type=file]"), taken = new DataTransfer();
  for (const file of files ?? []) if (file.type.startsWith(input?.accept.replace("*", ""))) taken.items.add(file);
  if (!taken.files.length) return;
  input.files = taken.files;
  input.dispatchEvent(new Event("change", { bubbles: true }));
  event.preventDefault();
}

addEventListener("paste", (event) => give(event, event.clipboardData?.files));
addEventListener("drop", (event) => event.target.closest(".mm-media .grid-wrap") && give(event, event.dataTransfer.files));
addEventListener("dragover", (event) => event.target.closest(".mm-media .grid-wrap") && event.preventDefault());
addEventListener("click", ({ target }) => {
  if (target.closest(".mm-add")) media().querySelector("input[type=file]").click();
  // gradio's gallery has no event for it.
  if (target.closest(".mm-media .grid-wrap [aria-label=Clear]")) press(".mm-clear", media());
}, true); // before gradio removes the button

/** Show a preview made by the server instead of an upload that the browser cannot show. */
const preview = (shown) => shown.closest?.(".mm-media") && press(".mm-preview", shown);

addEventListener("error", ({ target }) => preview(target), true);
addEventListener("loadedmetadata", ({ target }) => target.videoWidth === 0 && preview(target), true); // only sound
