// The engine's side of an answer: how fast it comes, which experts were in memory, and where the memory is.

import { byId, countText, drawn, element, sizeText } from "./dom.js";
import { Heat } from "./heat.js";
import { numbersOf } from "./server.js";

const DOTS = 100;
const POINTS = 48; // of the line of speed, one each quarter of a second
const QUARTER = 250;
const COUNT_EVERY = 1000;
const COUNTED = ["expert_hits", "expert_misses", "read_bytes"];
// What a model is made of comes first; of the rest, the largest parts.
const PARTS = { expert_slots: "experts", dense_weights: "dense weights", keys_and_values: "keys and values" };
const OTHERS = { process: "the process itself", text: "the tokenizer", renderer: "the chat template" };
const SHOWN = 5;

export class Side {
  constructor(server) {
    this._server = server;
    this._speed = new Speed();
    this._experts = new Experts();
    this._heat = new Heat(server);
    this._memory = element("section");
    byId("side-body").append(this._speed.node, this._experts.node, this._heat.node, this._memory);
  }

  /** Asks the server for the plan. */
  async look() {
    const { plan, memory } = await (await this._server.get("/plan")).json();
    this._experts.plan(plan);
    showMemory(this._memory, plan, memory);
  }

  begin() {
    this._speed.begin();
    this._experts.wait();
    this._heat.begin();
    this._round = { before: this._numbers(), over: false };
    clearInterval(this._timer);
    this._timer = setInterval(() => this._count(), COUNT_EVERY);
  }

  token() {
    this._speed.token();
  }

  /** When the answer is over; `usage` if the server told it. */
  async end(usage) {
    clearInterval(this._timer);
    this._speed.end(usage);
    this._round.over = true;
    await this._count(true);
    this.look().catch(() => {});
  }

  /** What was counted since the answer began: from time to time, and at last. */
  async _count(last = false) {
    const round = this._round;
    this._heat.look();
    const [before, now] = [await round.before, await this._numbers()];
    if (round !== this._round || round.over !== last) return;
    const counted = COUNTED.map((name) => (before && now ? now[name] - before[name] : 0));
    if (last || counted[0] + counted[1] > 0) this._experts.show(counted);
  }

  async _numbers() {
    try {
      const numbers = numbersOf(await (await this._server.get("/metrics")).text());
      return Object.fromEntries(COUNTED.map((name) => [name, numbers[`moeflux_${name}_total`] ?? 0]));
    } catch {
      return null;
    }
  }
}

function figure(number, words) {
  return element("p", { class: "figure" }, element("strong", {}, number), ` ${words}`);
}

// ---- Speed -----------------------------------------------------------------------------------------------------

class Speed {
  constructor() {
    this._number = element("strong", {}, "–");
    this._line = drawn("polyline", { class: "speed-line" });
    this._about = element("p", { class: "hint" }, "It is measured while an answer comes.");
    const chart = drawn(
      "svg",
      { class: "chart", viewBox: "0 0 240 48", preserveAspectRatio: "none", "aria-hidden": "true" },
      this._line,
    );
    this.node = element(
      "section",
      {},
      element("h3", {}, "Speed"),
      element("p", { class: "figure large" }, this._number, " tokens a second"),
      chart,
      this._about,
    );
  }

  begin() {
    this._began = performance.now();
    this._times = [];
    this._points = [];
    this._number.textContent = "–";
    this._line.setAttribute("points", "");
    this._about.textContent = "The prompt is read.";
    clearInterval(this._timer);
    this._timer = setInterval(() => this._tick(), QUARTER);
  }

  token() {
    this._times.push(performance.now());
  }

  end(usage) {
    clearInterval(this._timer);
    const count = usage?.completion_tokens ?? this._times.length;
    if (!this._times.length) {
      this._about.textContent = "No token came.";
      return;
    }
    const first = (this._times[0] - this._began) / 1000;
    const seconds = (this._times.at(-1) - this._times[0]) / 1000;
    // Of the tokens that were seen to come: those before the first part of a text would make it look faster.
    this._number.textContent = seconds > 0 ? speedText((this._times.length - 1) / seconds) : "–";
    const prompt = usage?.prompt_tokens;
    const known = usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const read = prompt
      ? ` The prompt had ${countText(prompt)} tokens${known ? `, of which ${countText(known)} were known` : ""}.`
      : "";
    const tokens = `${countText(count)} ${count === 1 ? "token" : "tokens"}`;
    this._about.textContent = `${tokens}, the first after ${first.toFixed(2)} s.${read}`;
  }

  /** The mean of the last two seconds. */
  _tick() {
    const now = performance.now();
    if (!this._times.length) return;
    const from = Math.max(now - 2000, this._times[0]);
    const recent = this._times.filter((time) => time > from).length;
    const speed = now > from ? (recent * 1000) / (now - from) : 0;
    this._points = [...this._points, speed].slice(-POINTS);
    this._number.textContent = speedText(speed);
    this._about.textContent = `${countText(this._times.length)} tokens so far`;
    const most = Math.max(...this._points, 1);
    const step = 240 / (Math.max(this._points.length, 2) - 1);
    this._line.setAttribute(
      "points",
      this._points.map((each, at) => `${(at * step).toFixed(1)},${(46 - (each / most) * 44).toFixed(1)}`).join(" "),
    );
  }
}

function speedText(speed) {
  return speed >= 100 ? countText(speed) : speed.toFixed(1);
}

// ---- Experts ---------------------------------------------------------------------------------------------------

class Experts {
  constructor() {
    this._dots = Array.from({ length: DOTS }, () => element("span", { class: "dot" }));
    this._picture = element("div", { class: "dots", role: "img", "aria-label": "No answer yet" }, this._dots);
    this._about = element("div", {}, element("p", { class: "hint" }, "They are counted while an answer is made."));
    const key = (name, words) => element("span", {}, element("span", { class: `key ${name}` }), words);
    const keys = element("p", { class: "hint keys" }, key("found", "in memory"), key("read", "read from the disk"));
    this._slots = element("p", { class: "hint" });
    this.node = element("section", {}, element("h3", {}, "Experts"), this._picture, keys, this._about, this._slots);
  }

  plan(plan) {
    this._slots.textContent =
      plan.slots >= plan.experts
        ? `All ${countText(plan.experts)} experts have a place in memory.`
        : `${countText(plan.slots)} of ${countText(plan.experts)} experts have a place in memory.`;
  }

  wait() {
    this._picture.classList.add("waiting");
  }

  show([hits, misses, bytes]) {
    this._picture.classList.remove("waiting");
    const asked = hits + misses;
    const found = asked ? hits / asked : 0;
    // Whatever was read at all has a dot.
    const full = misses > 0 ? Math.min(Math.round(found * DOTS), DOTS - 1) : DOTS;
    this._dots.forEach((dot, at) => {
      dot.className = asked === 0 ? "dot" : at < full ? "dot found" : "dot read";
    });
    if (!asked) {
      this._picture.setAttribute("aria-label", "Nothing was counted");
      this._about.replaceChildren(element("p", { class: "hint" }, "Of this answer, the server has counted nothing."));
      return;
    }
    this._picture.setAttribute("aria-label", `${Math.floor(found * 100)} of 100 were in memory`);
    this._about.replaceChildren(
      figure(
        misses ? `${(Math.floor(found * 1000) / 10).toFixed(1)} %` : "All",
        "were in memory when they were needed",
      ),
      element(
        "p",
        { class: "hint" },
        `${countText(asked)} were needed. ${countText(misses)} had to be waited for, and ` +
          `${sizeText(bytes)} were read from the disk. Other people's answers at the same time are counted too.`,
      ),
    );
  }
}

// ---- Memory ----------------------------------------------------------------------------------------------------

function showMemory(into, plan, memory) {
  const first = Object.keys(PARTS).map((name) => [PARTS[name], plan.parts[name] ?? 0]);
  const others = Object.entries(plan.parts)
    .filter(([name]) => !(name in PARTS))
    .map(([name, size]) => [OTHERS[name] ?? name.replaceAll("_", " "), size])
    .sort((one, other) => other[1] - one[1]);
  const parts = [...first, ...others].filter(([, size]) => size > 0);
  const rows = parts.slice(0, SHOWN);
  const rest = parts.slice(SHOWN).reduce((sum, [, size]) => sum + size, 0);
  if (rest) rows.push(["everything else", rest]);
  // What is free is shown as long as the rest can be seen beside it.
  const unspent = plan.unspent_bytes > plan.total_bytes ? 0 : plan.unspent_bytes;
  const bar = element(
    "div",
    { class: "bar", "aria-hidden": "true" },
    rows.map(([, size], at) => piece(size, `part-${at}`)),
    unspent > 0 ? piece(unspent, "part-free") : null,
  );
  const list = element(
    "dl",
    { class: "legend" },
    rows.map(([name, size], at) => [
      element("dt", {}, element("span", { class: `key part-${at}` }), name),
      element("dd", {}, sizeText(size)),
    ]),
  );
  const limit = plan.budget_bytes === null ? "without a limit" : `of ${sizeText(plan.budget_bytes)} allowed`;
  into.replaceChildren(
    element("h3", {}, "Memory"),
    figure(sizeText(plan.total_bytes), `planned, ${limit}`),
    bar,
    list,
    element("p", { class: "hint" }, `The whole process holds ${sizeText(memory.resident)} now.`),
  );
}

function piece(size, name) {
  const made = element("span", { class: name });
  made.style.flexGrow = size;
  return made;
}
