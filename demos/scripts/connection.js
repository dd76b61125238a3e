/* The connection to the server. A lost one is said at once; the page is kept, and goes on when the server is back. */

const EVERY = 900, PATIENCE = 1000; // milliseconds between checks, and until an answer counts as missing
const files = []; // that were uploaded, oldest first
let server = null; // id of the server's process
let lost = false, broken = false; // broken: requests did not survive it

const lostNote = element("p", { id: "mm-lost", class: "mm-note", role: "alert", hidden: "" },
  "The server does not answer. This page is kept as it is, and goes on when the server is back.");

function address(route) {
  return `${window.gradio_config?.root ?? location.origin}/gradio_api/${route}`;
}

async function check() {
  if (!document.hidden) {
    try {
      const answer = await fetch(address("alive"), { signal: AbortSignal.timeout(PATIENCE), cache: "no-store" });
      if (!answer.ok) throw new TypeError(answer.statusText);
      await found(await answer.text());
    } catch (error) {
      lost = true;
      broken ||= error.name === "TypeError"; // refused; a slow server may still be at work
      lostNote.hidden = false;
    }
  }
  setTimeout(check, EVERY);
}

/** The server answered. One that was restarted gets the uploads again, which it stores under a hash of their content. */
async function found(id) {
  if (server && id !== server) {
    broken = true;
    for (const file of files) await sendAgain(file);
  }
  server = id;
  if (lost) document.querySelectorAll(".toast-close").forEach((button) => button.click()); // gradio's message
  if (broken) document.querySelectorAll(".mm-stop:not(:disabled)").forEach((button) => press(".mm-resume", button));
  lost = broken = false;
  lostNote.hidden = true;
}

async function sendAgain(file) {
  const form = new FormData();
  form.append("files", file);
  await send(address("upload"), { method: "POST", body: form });
}

const MOST_KEPT = 16; // files
const send = window.fetch.bind(window);
window.fetch = (target, options) => {
  if (String(target?.url ?? target).includes("/gradio_api/upload") && options?.body instanceof FormData) {
    files.push(...options.body.getAll("files"));
    files.splice(0, files.length - MOST_KEPT);
  }
  return send(target, options);
};
