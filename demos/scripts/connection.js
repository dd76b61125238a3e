/* The connection to the server. A lost one is said at once; the page is kept, and goes on when the server is back.

   gradio's client gives up when a request fails, and reloads the page later. So requests wait here until the server
   answers again, and a broken stream of events ends like one whose requests have failed. */

const EVERY = 900, PATIENCE = 1000; // milliseconds between checks, and until an answer counts as missing
const MOST_KEPT = 16; // files
const FAILED = ["unexpected_error", "close_stream"].map((msg) => `data: ${JSON.stringify({ msg, message: "" })}\n\n`).join("");
const send = window.fetch.bind(window);
const files = []; // uploaded files, oldest first
const waiting = []; // functions that send a request again
let server = null; // id of the server's process
let broken = false; // running requests were lost

const lostNote = Object.assign(document.createElement("p"), { id: "mm-lost", className: "mm-note", hidden: true,
  role: "alert", textContent: "The server does not answer. This page stays as it is, and goes on when the server is back." });
const address = (route) => `${window.gradio_config?.root ?? location.origin}/gradio_api/${route}`;

async function check() {
  try {
    const answer = document.hidden ? null : await send(address("alive"), { signal: AbortSignal.timeout(PATIENCE), cache: "no-store" });
    if (answer && !answer.ok) throw new TypeError(answer.statusText);
    if (answer) await found(await answer.text());
  } catch (error) {
    broken ||= error.name === "TypeError"; // refused; a slow server may still be at work
    lostNote.hidden = false;
  }
  setTimeout(check, EVERY);
}

/** The server answered. A restarted server gets the uploads again, and stores them under a hash of their content. */
async function found(id) {
  const restarted = server && id !== server;
  for (const file of restarted ? files : []) {
    const body = new FormData();
    body.append("files", file);
    await send(address("upload"), { method: "POST", body });
  }
  server = id;
  if (broken || restarted) document.querySelectorAll(".mm-stop:not(:disabled)").forEach((button) => press(".mm-resume", button));
  broken = false;
  lostNote.hidden = true;
  waiting.splice(0).forEach((again) => again());
}

/** Send a request; one that the server does not receive is sent when it is back. */
async function patient(target, options) {
  try {
    return await send(target, options);
  } catch (error) {
    if (error.name !== "TypeError") throw error;
    await new Promise((again) => waiting.push(again));
    return patient(target, options);
  }
}

/** A stream of events that does not break. */
async function unbroken(request) {
  const reader = (await send(request).catch(() => null))?.body.getReader(), failed = new TextEncoder().encode(FAILED);
  return new Response(new ReadableStream({
    async pull(controller) {
      const part = await reader?.read().catch(() => null);
      controller.enqueue(part?.value ?? failed);
      if (!part?.value) controller.close();
    },
    cancel: (reason) => reader?.cancel(reason),
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
