/* The connection to the server. A lost one is said at once; the page is kept, and goes on when the server is back.

   gradio's client gives up when a request fails, and reloads the page later. So requests wait here until the server
   answers again, and a broken stream of events ends like one whose requests have failed. */

const EVERY = 900, PATIENCE = 1000; // milliseconds between checks, and until an answer counts as missing
const MOST_KEPT = 16; // files
const FAILED = ["unexpected_error", "close_stream"].map((msg) => `data: ${JSON.stringify({ msg, message: "" })}\n\n`).join("");
const send = window.fetch.bind(window);
const files = []; // that were uploaded, oldest first
const waiting = []; // functions that send a request again
let server = null; // id of the server's process
let lost = false, broken = false; // broken: running requests did not survive it

const lostNote = element("p", { id: "mm-lost", class: "mm-note", role: "alert", hidden: "" },
  "The server does not answer. This page stays as it is, and goes on when the server is back.");

function address(route) {
  return `${window.gradio_config?.root ?? location.origin}/gradio_api/${route}`;
}

async function check() {
  if (!document.hidden) {
    try {
      const answer = await send(address("alive"), { signal: AbortSignal.timeout(PATIENCE), cache: "no-store" });
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
    for (const file of files) {
      const form = new FormData();
      form.append("files", file);
      await send(address("upload"), { method: "POST", body: form });
    }
  }
  server = id;
  if (broken) document.querySelectorAll(".mm-stop:not(:disabled)").forEach((button) => press(".mm-resume", button));
  lost = broken = false;
  lostNote.hidden = true;
  waiting.splice(0).forEach((again) => again());
}

/** A request of the page; one that the server does not receive is sent when it is back. */
async function patient(target, options) {
  for (;;) {
    try {
      return await send(target, options);
    } catch (error) {
      if (error.name !== "TypeError") throw error;
      await new Promise((again) => waiting.push(again));
    }
  }
}

/** A stream of events that does not break. */
async function unbroken(request) {
  const failed = new TextEncoder().encode(FAILED);
  let reader;
  try {
    reader = (await send(request)).body.getReader();
  } catch (error) {
    if (error.name !== "TypeError") throw error;
    return new Response(failed);
  }
  return new Response(new ReadableStream({
    async pull(controller) {
      const part = await reader.read().catch(() => ({ done: true }));
      controller.enqueue(part.done ? failed : part.value);
      if (part.done) controller.close();
    },
    cancel: (reason) => reader.cancel(reason),
  }));
}

window.fetch = (target, options) => {
  const route = String(target?.url ?? target).split("/gradio_api/")[1] ?? "";
  if (route.startsWith("queue/data")) return unbroken(target);
  if (options?.method !== "POST" || !route) return send(target, options);
  if (options.body instanceof FormData) {
    files.push(...options.body.getAll("files"));
    files.splice(0, files.length - MOST_KEPT);
  }
  return patient(target, options);
};
