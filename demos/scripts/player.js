/* Replay of recorded answers. Python renders the lanes with the pass of every token (data-pass) and the recording as JSON
   (data-recording); the player adds the draft trees, and the buttons to share. */

const SLOWER = [1, 3, 10, 30, 100, 300];
const WATCH_SECONDS = 15; // of the default speed
const CHECKED = 0.85; // share of a pass after which its verdict is shown

function linkTo(settings) {
  const url = new URL(location.origin + location.pathname);
  for (const [name, value] of Object.entries(settings)) url.searchParams.set(name, Array.isArray(value) ? value.map(encodeURIComponent).join(",") : value);
  return url.href;
}

class Replay {
  constructor(section, recorded) {
    this.section = section;
    this.settings = recorded.settings;
    this.lanes = recorded.lanes;
    this.boxes = [...section.querySelectorAll(".mm-lane")];
    this.counts = this.boxes.map((box) => box.querySelector(".mm-count").textContent);
    this.start = Math.max(0, ...this.lanes.map((lane) => lane.ends[0] ?? 0)); // all lanes have a token
    this.total = Math.max(...this.lanes.map((lane) => lane.ends.at(-1) ?? 0));
    this.longest = Math.max(...this.lanes.map((lane) => lane.emitted.reduce((sum, one) => sum + one, 0)), 1);
    this.time = this.total;
    this.playing = false;
    this.first = null; // first level that is shown; null follows the replay
    this.drafted = this.lanes.filter((lane) => lane.trees.length);
    this.lane = this.drafted.reduce((best, lane) => !best || lane.seconds < best.seconds ? lane : best, null);
    this.addPlayer();
    if (this.lane) this.addTree();
    this.addSharing();
    this.rest = true; // the whole text, and the pass with the longest accepted path
    this.render();
  }

  addPlayer() {
    const off = (slower) => Math.abs(Math.log(slower * (this.total - this.start) / WATCH_SECONDS));
    const fitting = SLOWER.reduce((best, one) => off(one) < off(best) ? one : best);
    this.slower = fitting;
    this.button = element("button", { type: "button", class: "mm-play", onclick: () => this.toggle() });
    this.scrub = element("input", { type: "range", min: 0, max: 1000, step: 1, "aria-label": "Time of the replay",
      oninput: () => this.seek(this.total * this.scrub.value / 1000) });
    this.clock = element("span", { class: "mm-clock" });
    const options = SLOWER.map((one) =>
      element("option", { value: one, ...(one === fitting ? { selected: "" } : {}) }, one === 1 ? "real time" : `${one}x slower`));
    const speed = element("select", { "aria-label": "Speed of the replay", onchange: () => { this.slower = +speed.value; } },
      ...options);
    this.section.querySelector(".mm-player").append(this.button, speed, this.scrub, this.clock);
  }

  addTree() {
    const view = this.section.querySelector(".mm-tree-view");
    this.slider = element("input", { type: "range", min: 1, step: 1, "aria-label": "Pass",
      oninput: () => this.seek(this.lane.ends[+this.slider.value]) });
    this.number = element("span", { class: "mm-clock" });
    this.phase = element("p", { class: "mm-phase" });
    this.canvas = element("div", { class: "mm-scroll", onclick: (event) => {
      const at = event.target.closest("[data-node]");
      this.open(true, at && at.dataset.node);
    } });
    this.earlier = element("button", { type: "button", "aria-label": "Earlier levels", onclick: () => this.page(-1) }, "‹ Earlier");
    this.later = element("button", { type: "button", "aria-label": "Later levels", onclick: () => this.page(1) }, "Later ›");
    this.levels = element("span", {});
    this.pager = element("div", { class: "mm-pager", hidden: "" }, this.earlier, this.levels, this.later);
    this.opener = element("button", { type: "button", "aria-expanded": "false", onclick: () => this.open(!this.opened) },
      "Table of probabilities");
    this.table = element("div", { class: "mm-wide", tabindex: "0", role: "region", "aria-label": "Probabilities", hidden: "" });
    const head = element("div", { class: "mm-tree-head" }, element("h3", { class: "mm-part" }, this.drafted.length > 1 ? "Draft tree" : `Draft tree of ${this.lane.label}`));
    if (this.drafted.length > 1) {
      const pick = element("select", { "aria-label": "Lane of the draft tree", onchange: () => {
        this.lane = this.drafted[+pick.value];
        this.first = null;
        this.rest ? this.render() : this.seek(this.time);
      } }, ...this.drafted.map((lane, i) =>
        element("option", { value: i, ...(lane === this.lane ? { selected: "" } : {}) }, lane.label)));
      head.append(pick);
    }
    head.append(this.slider, this.number);
    view.append(head, this.phase, this.canvas, this.pager, this.opener, this.table);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    for (const box of this.boxes) {
      box.querySelector(".mm-text").addEventListener("click", (event) => {
        const lane = this.lanes[this.boxes.indexOf(box)], pass = +(event.target.dataset.pass ?? 0);
        if (lane === this.lane && pass > 0) this.seek(lane.ends[pass]);
      });
    }
  }

  addSharing() {
    const said = element("span", { role: "status" }), say = (text) => { said.textContent = text; };
    const button = (name, act) => element("button", { type: "button", onclick: act }, name);
    const copied = (text, message) => copy(text).then(() => say(message), () => say("The browser refused to copy."));
    this.section.querySelector(".mm-share").append(
      button("Copy answer", () => copied(this.lanes[0].text, "Answer copied.")),
      button("Copy link", () => copied(linkTo(this.settings), this.settings.kind === "text" || this.settings.example
        ? "Link copied." : `Link to these settings copied; the ${this.settings.kind} is not part of it.`)),
      button("Save as file", () => {
        const file = new Blob([JSON.stringify({ settings: this.settings, lanes: this.lanes }, null, 1)],
          { type: "application/json" });
        const link = element("a", { href: URL.createObjectURL(file), download: "mmspec-race.json" });
        link.click();
        URL.revokeObjectURL(link.href);
        say("Saved.");
      }), said);
  }

  toggle() {
    this.playing = !this.playing;
    this.first = null;
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
    this.time = Math.min(this.time + (now - this.last) / 1000 / this.slower, this.total);
    this.last = now;
    if (this.time >= this.total) this.playing = false;
    else requestAnimationFrame((next) => this.frame(next));
    this.render();
  }

  seek(time) {
    this.playing = this.rest = false;
    this.first = null;
    this.time = time;
    this.render();
  }

  page(direction) {
    this.first = this.grid.from + direction * Math.max(this.grid.shown - 1, 1);
    this.draw();
  }

  open(opened, node) {
    this.opened = opened;
    this.opener.setAttribute("aria-expanded", String(opened));
    this.table.hidden = !opened;
    this.fill();
    for (const row of this.table.querySelectorAll("tr[data-node]")) row.classList.toggle("chosen", row.dataset.node === node);
    const chosen = this.table.querySelector(".chosen");
    if (chosen) chosen.scrollIntoView({ block: "nearest" });
  }

  render() {
    const end = this.time >= this.total;
    this.button.textContent = this.playing ? "Pause" : end ? "Replay in slow motion" : "Play";
    this.scrub.value = Math.round(1000 * this.time / this.total);
    this.scrub.setAttribute("aria-valuetext", `${seconds(this.time)} of ${seconds(this.total)}`);
    this.clock.textContent = seconds(this.time);
    if (this.lane) this.place();
    this.lanes.forEach((lane, i) => this.renderLane(lane, this.boxes[i], this.counts[i]));
    if (this.lane) this.draw();
  }

  renderLane(lane, box, whole) {
    const ended = lane.ends.filter((end) => end <= this.time + 1e-9).length;
    const done = ended === lane.ends.length;
    const tokens = lane.emitted.slice(0, ended).reduce((sum, one) => sum + one, 0);
    box.querySelector(".mm-count").textContent = done ? whole : `${count(tokens, "token")} · ${seconds(Math.min(this.time, lane.seconds))}`;
    box.querySelector(".mm-bar i").style.width = `${100 * tokens / this.longest}%`;
    for (const span of box.querySelectorAll("[data-pass]")) {
      span.classList.toggle("mm-later", +span.dataset.pass >= ended);
      span.classList.toggle("mm-now", lane === this.lane && +span.dataset.pass === this.pass);
    }
  }

  /** The pass of the tree's lane at the current time, and how far it is. */
  place() {
    const { ends, trees } = this.lane;
    if (this.rest) {
      this.pass = 1 + trees.reduce((best, tree, i) => tree.path.length > trees[best].path.length ? i : best, 0);
      this.done = 1;
      return;
    }
    const last = Math.min(trees.length, ends.length - 1);
    this.pass = Math.min(Math.max(ends.findIndex((end) => end >= this.time - 1e-9), 1), last);
    if (this.time >= ends[last]) this.pass = last;
    this.done = Math.min(Math.max((this.time - ends[this.pass - 1]) / (ends[this.pass] - ends[this.pass - 1]), 0), 1);
    if (this.time < ends[0]) this.done = -1;
  }

  draw() {
    const lane = this.lane, nodes = nodesOf(lane, this.pass), width = this.canvas.clientWidth - 16;
    if (width <= 0) return;
    const deepest = Math.max(0, ...nodes.filter((node) => !node.bonus).map((node) => node.level));
    const [draft, verify] = lane.shares, name = `Pass ${this.pass} of ${lane.ends.length - 1}`;
    const drafting = CHECKED * Math.min(Math.max(draft / (draft + verify || 1), 0.3), 0.7);
    const verdict = this.verdict = this.done >= CHECKED, checking = !verdict && this.done >= drafting;
    const levels = verdict || checking ? deepest : Math.max(0, Math.ceil(deepest * this.done / drafting));
    const end = nodes.at(-1).level; // of the bonus token
    const follow = this.rest ? 0 : verdict ? end - 3 : checking ? 0 : levels - 3;
    this.grid = columns(nodes, width, this.first ?? (width < PHONE ? follow : 0));
    const accepted = nodes.filter((node) => node.fate === "kept").length, drafted = nodes.length - 2;
    const bonus = nodes.at(-1).fate === "bonus", all = count(accepted + bonus, "token");
    const title = `Draft tree of ${name.toLowerCase()}: ${count(drafted, "draft token")}, ${accepted} accepted${bonus ? ", then the bonus token" : ""}`;
    this.slider.max = Math.min(lane.trees.length, lane.ends.length - 1);
    this.slider.value = this.pass;
    this.slider.setAttribute("aria-valuetext", name);
    this.number.textContent = name;
    this.phase.textContent = this.done < 0 ? "Prefill: the model reads the prompt."
      : verdict ? `Kept: ${count(accepted, "draft token")} of ${drafted}, ${bonus ? "and the bonus token" : "up to the end of the answer"}: ${all} from one pass of the model.`
      : checking ? `Checking: the model verifies ${count(drafted, "draft token")} in one pass.`
      : `Drafting: the drafter proposes ${count(drafted, "token")}.`;
    const key = [lane.method, this.pass, levels, verdict, checking, this.grid.from, width].join();
    if (key === this.key) return;
    this.key = key;
    this.canvas.replaceChildren(drawTree(nodes, this.grid, title, { levels, verdict, checking }));
    this.canvas.style.minHeight = this.rest ? "" : `${Math.min(this.tallest(), 420)}px`;
    const cut = this.grid.shown < this.grid.levels, last = this.grid.from + this.grid.shown - 1;
    this.pager.hidden = !cut;
    this.levels.textContent = `levels ${Math.max(this.grid.from, 1)} to ${last} of ${this.grid.levels - 1}`;
    this.earlier.disabled = this.grid.from === 0;
    this.later.disabled = last >= this.grid.levels - 1;
    if (this.opened) this.fill();
  }

  /** Height of the tallest tree, which the replay reserves: what lies below does not move. */
  tallest() {
    const heights = this.lane.trees.map((_, i) => 1 + Math.max(...nodesOf(this.lane, i + 1).map((node) => node.row)));
    return Math.max(...heights) * ROW + 24;
  }

  fill() {
    const total = this.lane.ends.length - 1;
    this.table.replaceChildren(...(this.opened
      ? [probabilities(nodesOf(this.lane, this.pass), `Pass ${this.pass} of ${total}, ${this.lane.label}`, this.verdict)] : []));
  }
}
