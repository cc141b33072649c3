// Which experts an answer took: a row for each layer, a column for each expert, the fuller the more often.

import { countText, element } from "./dom.js";

const WIDTH = 768; // of the picture's own points
const HEIGHT = 384;
const FAINTEST = 0.12; // of what was picked at all

export class Heat {
  constructor(server) {
    this._server = server;
    this._picture = element("canvas", { class: "heat", width: WIDTH, height: HEIGHT, role: "img" });
    this._about = element("p", { class: "hint" });
    this.node = element("section", {}, element("h3", {}, "Experts by layer"), this._picture, this._about);
    this._say("No answer yet", "It is counted while an answer is made and this is open.");
  }

  begin() {
    this._round = { before: null };
    this.look();
  }

  /** What was picked since the answer began, or since this was opened. Nobody counts while nobody looks. */
  async look() {
    const round = this._round;
    if (!round || this.node.offsetParent === null) return;
    try {
      const { layers, counts } = await (await this._server.get("/experts")).json();
      if (round !== this._round) return;
      round.before ??= counts;
      this._show(
        layers,
        counts.map((row, at) => row.map((count, expert) => count - round.before[at][expert])),
      );
    } catch {
      // The next look may do better.
    }
  }

  _show(layers, picked) {
    const most = Math.max(0, ...picked.map((row) => Math.max(...row)));
    const context = this._picture.getContext("2d");
    context.clearRect(0, 0, WIDTH, HEIGHT);
    if (!most) return;
    context.fillStyle = getComputedStyle(this._picture).color;
    const high = HEIGHT / picked.length;
    picked.forEach((row, at) => {
      const wide = WIDTH / row.length;
      row.forEach((count, expert) => {
        if (!count) return;
        context.globalAlpha = FAINTEST + (1 - FAINTEST) * Math.sqrt(count / most);
        context.fillRect(expert * wide, at * high, Math.max(wide, 1), Math.max(high - 1, 1));
      });
    });
    const used = picked.flat().filter((count) => count > 0).length;
    const row = picked.findIndex((counts) => counts.includes(most));
    this._say(
      `${countText(used)} of ${countText(picked.flat().length)} experts were picked`,
      `A row is a layer, a column an expert. ${countText(used)} of ${countText(picked.flat().length)} were picked; most ` +
        `often, ${countText(most)} times, expert ${picked[row].indexOf(most)} of layer ${layers[row]}.`,
    );
  }

  _say(short, long) {
    this._picture.setAttribute("aria-label", short);
    this._about.textContent = long;
  }
}
