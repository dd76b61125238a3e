/* Replay of recorded answers. templates/result.html has the controls, the lanes with the pass of every token (data-pass) and
   the recording as JSON (data-recording); the player adds the draft trees. */

const WATCH_SECONDS = 15; // of the default speed
const CHECKED = 0.85; // share of a pass after which its verdict is shown

class Replay {
  constructor(section, { settings, lanes }) {
    Object.assign(this, { section, settings, lanes, playing: false, rest: true }); // rest: the whole text is shown
    this.boxes = [...section.querySelectorAll(".mm-lane")];
    this.counts = this.boxes.map((box) => box.querySelector(".mm-count").textContent);
    this.start = Math.max(0, ...lanes.map((lane) => lane.ends[0] ?? 0)); // all lanes have a token
    this.time = this.total = Math.max(...lanes.map((lane) => lane.ends.at(-1) ?? 0));
    this.longest = Math.max(...lanes.map((lane) => lane.emitted.reduce((sum, one) => sum + one, 0)), 1);
    this.drafted = lanes.filter((lane) => lane.trees.length).sort((one, other) => one.seconds - other.seconds);
    [this.lane] = this.drafted;
    const off = ({ value }) => Math.abs(Math.log(value * (this.total - this.start) / WATCH_SECONDS));
    this.speed = this.find(".mm-slower");
    [...this.speed.options].reduce((best, one) => off(one) < off(best) ? one : best).selected = true;
    section.addEventListener("click", ({ target }) => {
      const action = target.closest("[data-do]"), span = target.closest("[data-pass]");
      if (action) this[action.dataset.do]();
      else if (target.closest(".mm-scroll")) this.open(target.closest("[data-node]")?.dataset.node);
      else if (span && this.lanes[this.boxes.indexOf(span.closest(".mm-lane"))] === this.lane && +span.dataset.pass) {
        this.seek(this.lane.ends[span.dataset.pass]);
      }
    });
    section.addEventListener("input", ({ target }) => {
      if (target.matches(".mm-scrub")) this.seek(this.total * target.value / 1000);
      if (target.matches(".mm-pass")) this.seek(this.lane.ends[target.value]);
      if (target.matches(".mm-pick")) {
        this.lane = this.drafted[target.value];
        this.render();
      }
    });
    this.render();
  }

  find(selector) {
    return this.section.querySelector(selector);
  }

  say(message) {
    this.find(".mm-share [role=status]").textContent = message;
  }

  copyAnswer() {
    this.copy(this.lanes[0].text, "Answer copied.");
  }

  copyLink() {
    const { kind, example, methods } = this.settings, url = new URL(location.pathname, location.origin);
    url.search = new URLSearchParams({ ...this.settings, methods: methods.map(encodeURIComponent) });
    this.copy(url.href, kind === "text" || example ? "Link copied." : `Link to these settings copied; the ${kind} is not part of it.`);
  }

  save() {
    const file = new Blob([JSON.stringify({ settings: this.settings, lanes: this.lanes }, null, 1)], { type: "application/json" });
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(file), download: "mmspec-race.json" });
    link.click();
    URL.revokeObjectURL(link.href);
    this.say("Saved.");
  }

  async copy(text, message) {
    let done = true;
    if (navigator.clipboard) await navigator.clipboard.writeText(text).catch(() => { done = false; });
    else { // addresses other than loopback need HTTPS for the clipboard
      const area = Object.assign(document.createElement("textarea"), { className: "mm-sr", value: text });
      document.body.append(area);
      area.select();
      done = document.execCommand("copy");
      area.remove();
    }
    this.say(done ? message : "The browser refused to copy.");
  }

  toggle() {
    this.playing = !this.playing;
    if (this.playing) {
      if (this.time >= this.total) this.time = this.start;
      this.rest = false;
      this.last = performance.now();
      requestAnimationFrame((now) => this.frame(now));
    }
    this.render();
  }

  frame(now) {
    if (!this.playing || !this.section.isConnected) return;
    this.time = Math.min(this.time + (now - this.last) / 1000 / this.speed.value, this.total);
    this.last = now;
    if (this.time >= this.total) this.playing = false;
    else requestAnimationFrame((next) => this.frame(next));
    this.render();
  }

  seek(time) {
    this.playing = this.rest = false;
    this.time = time;
    this.render();
  }

  /** Open the table of probabilities at a node. */
  open(node) {
    this.find("details").open = true;
    for (const row of this.section.querySelectorAll("tr[data-node]")) row.classList.toggle("chosen", row.dataset.node === node);
    this.find(".chosen")?.scrollIntoView({ block: "nearest" });
  }

  render() {
    this.find(".mm-play").textContent = this.playing ? "Pause" : this.time >= this.total ? "Replay in slow motion" : "Play";
    const scrub = this.find(".mm-scrub");
    scrub.value = Math.round(1000 * this.time / this.total);
    scrub.setAttribute("aria-valuetext", `${seconds(this.time)} of ${seconds(this.total)}`);
    this.find(".mm-clock").textContent = seconds(this.time);
    if (this.lane) this.renderTree();
    this.lanes.forEach((lane, i) => {
      const box = this.boxes[i], ended = lane.ends.filter((end) => end <= this.time + 1e-9).length;
      const tokens = lane.emitted.slice(0, ended).reduce((sum, one) => sum + one, 0);
      box.querySelector(".mm-count").textContent = ended === lane.ends.length ? this.counts[i]
        : `${count(tokens, "token")} · ${seconds(Math.min(this.time, lane.seconds))}`;
      box.querySelector(".mm-bar i").style.width = `${100 * tokens / this.longest}%`;
      for (const span of box.querySelectorAll("[data-pass]")) {
        span.classList.toggle("mm-later", +span.dataset.pass >= ended);
        span.classList.toggle("mm-now", lane === this.lane && +span.dataset.pass === this.pass);
      }
    });
  }

  renderTree() {
    const { ends, trees, shares: [draft, verify] } = this.lane, passes = Math.min(trees.length, ends.length - 1);
    const best = trees.reduce((most, tree, i) => tree.path.length > trees[most].path.length ? i : most, 0);
    const current = ends.findIndex((end, i) => i && end >= this.time - 1e-9);
    this.pass = this.rest ? 1 + best : current < 0 ? passes : Math.min(current, passes);
    const from = ends[this.pass - 1], share = Math.min((this.time - from) / (ends[this.pass] - from), 1);
    const drafting = CHECKED * Math.min(Math.max(draft / (draft + verify || 1), 0.3), 0.7); // share of the pass
    const phase = this.rest || share >= CHECKED ? "verdict" : share >= drafting ? "checking" : "drafting";
    const nodes = nodesOf(this.lane, this.pass), drafts = nodes.slice(1, -1), bonus = nodes.at(-1).fate === "bonus";
    const deepest = Math.max(0, ...drafts.map((node) => node.level));
    const level = phase === "drafting" ? Math.max(0, Math.ceil(deepest * share / drafting)) : deepest;
    const accepted = drafts.filter((node) => node.fate === "kept").length, drafted = count(drafts.length, "draft token");
    const name = `Pass ${this.pass} of ${ends.length - 1}`, all = count(accepted + bonus, "token");
    const canvas = this.find(".mm-scroll"), slider = Object.assign(this.find(".mm-pass"), { max: passes, value: this.pass });
    slider.setAttribute("aria-valuetext", name);
    this.find(".mm-tree-head .mm-clock").textContent = name;
    this.find(".mm-phase").textContent = !this.rest && this.time < ends[0] ? "Prefill: the model reads the prompt." : {
      drafting: `Drafting: the drafter proposes ${count(drafts.length, "token")}.`,
      checking: `Checking: the model verifies ${drafted} in one pass.`,
      verdict: `Kept: ${count(accepted, "draft token")} of ${drafts.length}, ${bonus ? "and the bonus token"
        : "up to the end of the answer"}: ${all} from one pass of the model.`,
    }[phase];
    const key = [this.lane.method, this.pass].join();
    if (key !== this.key) {
      this.key = key;
      canvas.style.minHeight = this.playing ? `${canvas.offsetHeight}px` : ""; // what lies below does not move
      const title = `Draft tree of ${name.toLowerCase()}: ${drafted}, ${accepted} accepted${bonus ? ", then the bonus token" : ""}`;
      canvas.innerHTML = `<ul class="mm-tree" aria-label="${title}">${treeHtml(nodes)}</ul>`;
      this.find(".mm-probabilities").innerHTML = tableHtml(nodes, canvas.querySelectorAll("li"), `${name}, ${safe(this.lane.label)}`);
    }
    this.find(".mm-tree-view").dataset.phase = phase;
    const shown = [...canvas.querySelectorAll("li")].filter((node) => {
      const later = node.dataset.last === undefined ? +node.dataset.level > level : phase !== "verdict";
      node.classList.toggle("mm-later", later);
      return !later;
    });
    const right = Math.max(...shown.map((node) => node.firstElementChild.getBoundingClientRect().right));
    canvas.scrollLeft = this.rest || phase === "checking" ? 0
      : canvas.scrollLeft + right - canvas.getBoundingClientRect().right + 8;
  }
}
