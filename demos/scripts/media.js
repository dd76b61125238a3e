/* Images and videos: buttons, paste and drop, previews of what the browser cannot show. */

const previewed = new Set(); // addresses whose preview was asked for

/** Hand files to the upload of the visible tab; says whether it takes them. */
function give(files) {
  const media = [...document.querySelectorAll(".mm-media")].find((one) => one.offsetParent);
  const input = media?.querySelector("input[type=file]");
  const taken = new DataTransfer();
  for (const file of files) {
    if (file.type.startsWith(input?.accept.replace("*", ""))) taken.items.add(file);
  }
  if (!taken.files.length) return false;
  input.files = taken.files;
  input.dispatchEvent(new Event("change", { bubbles: true }));
  return true;
}

document.addEventListener("paste", (event) => {
  if (give(event.clipboardData?.files ?? [])) event.preventDefault();
});

document.addEventListener("drop", (event) => {
  if (event.target.closest(".mm-media .grid-wrap") && give(event.dataTransfer.files)) event.preventDefault();
});
document.addEventListener("dragover", (event) => {
  if (event.target.closest(".mm-media .grid-wrap")) event.preventDefault();
});

document.addEventListener("click", (event) => {
  const media = event.target.closest(".mm-side")?.querySelector(".mm-media");
  if (event.target.closest(".mm-add")) media.querySelector("input[type=file]").click();
  // gradio's gallery has no event for it.
  if (event.target.closest(".mm-media .grid-wrap [aria-label=Clear]")) press(".mm-clear", media);
}, true); // before gradio removes the button

/** Show a preview made by the server instead of an upload that the browser cannot show. */
function preview(shown) {
  const media = shown.closest?.(".mm-media"), address = shown.currentSrc || shown.src;
  if (!media || !address || previewed.has(address)) return;
  previewed.add(address);
  press(".mm-preview", media);
}

document.addEventListener("error", (event) => preview(event.target), true);
document.addEventListener("loadedmetadata", (event) => {
  if (event.target.videoWidth === 0) preview(event.target); // only its sound can be played
}, true);
