// Markdown to DOM nodes. Every tag that can come out is written in this file, and text only ever becomes text nodes.
// Whatever a model writes, the time is in proportion to its length: that nothing closes a mark is found out once.

import { copyButton, element } from "./dom.js";
import { inline } from "./inline.js";

const DEEPEST = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/s;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/s;
const ITEM = /^( {0,9})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)(.*)$/s;
const QUOTE = /^ {0,3}> ?(.*)$/s;
const CELLS = /^[ \t|:-]+$/;

/** Keeps an element as the Markdown of a text that grows. What has not changed since is not made again. */
export class Markdown {
  constructor(into) {
    this._into = into;
    this._blocks = [];
  }

  show(text) {
    const blocks = blocksOf(text.split(/\r?\n/), 0);
    let same = 0;
    while (same < blocks.length && this._blocks[same]?.source === blocks[same].source) same += 1;
    for (const block of this._blocks.splice(same)) block.node.remove();
    for (const block of blocks.slice(same)) {
      block.node = block.make();
      this._into.append(block.node);
      this._blocks.push(block);
    }
  }
}

export function markdownOf(text) {
  const into = element("div", { class: "prose" });
  new Markdown(into).show(text);
  return into;
}

/** [{ source, make }] of lines. `source` is equal only where what would be made is. */
function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const begin = at;
    const [end, make] = blockAt(lines, at, depth);
    at = end;
    blocks.push({ source: lines.slice(begin, end).join("\n"), make });
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence && !(fence[1][0] === "`" && fence[2].includes("`"))) return codeAt(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading)
    return [at + 1, () => element(`h${Math.min(heading[1].length + 2, 6)}`, {}, inline(unclosed(heading[2])))];
  if (isRule(line)) return [at + 1, () => element("hr")];
  if (depth < DEEPEST && QUOTE.test(line)) return quoteAt(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return listAt(lines, at, depth);
  if (isTable(lines, at)) return tableAt(lines, at);
  let end = at + 1;
  while (end < lines.length && !endsParagraph(lines, end)) end += 1;
  return [end, () => element("p", {}, inline(lines.slice(at, end).join("\n")))];
}

function endsParagraph(lines, at) {
  const line = lines[at];
  return (
    line.trim() === "" ||
    FENCE.test(line) ||
    HEADING.test(line) ||
    QUOTE.test(line) ||
    ITEM.test(line) ||
    isRule(line) ||
    isTable(lines, at)
  );
}

/** A heading without the marks that may close it. */
function unclosed(text) {
  let end = text.trimEnd().length;
  const whole = end;
  while (end > 0 && text[end - 1] === "#") end -= 1;
  return end === 0 || text[end - 1] === " " ? text.slice(0, end).trim() : text.slice(0, whole);
}

function isRule(line) {
  const marks = line.replaceAll(" ", "").replaceAll("\t", "");
  return marks.length >= 3 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
}

function blocksInto(into, lines, depth) {
  for (const block of blocksOf(lines, depth)) into.append(block.make());
  return into;
}

// ---- Code ------------------------------------------------------------------------------------------------------

function codeAt(lines, at, [, mark, language]) {
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], mark)) end += 1;
  const code = lines.slice(at + 1, end).join("\n");
  const name = language.trim().split(/\s/, 1)[0].slice(0, 40);
  return [Math.min(end + 1, lines.length), () => codeBlock(code, name)];
}

function closes(line, mark) {
  const text = line.trim();
  return text.length >= mark.length && text === mark[0].repeat(text.length);
}

export function codeBlock(code, name) {
  const head = element(
    "figcaption",
    {},
    element("span", {}, name),
    copyButton(() => code),
  );
  const body = element(
    "pre",
    { tabindex: 0, role: "region", "aria-label": name ? `Code, ${name}` : "Code" },
    element("code", {}, code),
  );
  return element("figure", { class: "code" }, head, body);
}

// ---- Quotes and lists ------------------------------------------------------------------------------------------

function quoteAt(lines, at, depth) {
  const inner = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const quoted = QUOTE.exec(lines[end]);
    if (!quoted) break;
    inner.push(quoted[1]);
  }
  return [end, () => blocksInto(element("blockquote"), inner, depth + 1)];
}

function listAt(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const numbered = first[2].length > 1;
  const items = [];
  let end = at;
  let loose = false;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > first[1].length + 1 || item[2].length > 1 !== numbered || isRule(lines[end])) break;
    const inside = item[1].length + item[2].length + 1;
    const inner = [item[3]];
    end += 1;
    while (end < lines.length && belongs(lines, end, inside)) {
      inner.push(cutSpace(lines[end], inside));
      end += 1;
    }
    items.push(inner);
    let next = end;
    while (next < lines.length && lines[next].trim() === "") next += 1;
    if (next === end || next === lines.length || !ITEM.test(lines[next])) {
      if (next !== end) break;
      continue;
    }
    loose = true;
    end = next;
  }
  const make = () => {
    const list = element(numbered ? "ol" : "ul", numbered ? { start: parseInt(first[2], 10) } : {});
    if (loose) list.classList.add("loose");
    for (const inner of items) list.append(itemOf(inner, depth));
    return list;
  };
  return [Math.max(end, at + 1), make];
}

/** Whether a line goes on with an item whose text begins `inside` characters in. */
function belongs(lines, at, inside) {
  const line = lines[at];
  if (line.trim() === "") {
    const next = lines[at + 1];
    return next !== undefined && next.trim() !== "" && spaceOf(next) >= Math.min(inside, 2);
  }
  return spaceOf(line) >= Math.min(inside, 2) || (lines[at - 1].trim() !== "" && !endsParagraph(lines, at));
}

function spaceOf(line) {
  return line.length - line.trimStart().length;
}

function cutSpace(line, most) {
  return line.slice(Math.min(spaceOf(line), most));
}

function itemOf(inner, depth) {
  const item = element("li");
  const task = /^\[([ xX])\] /.exec(inner[0]);
  if (task) {
    const done = task[1] !== " ";
    item.classList.add("task");
    item.append(element("span", { role: "img", "aria-label": done ? "done" : "to do" }, done ? "☑ " : "☐ "));
    inner = [inner[0].slice(4), ...inner.slice(1)];
  }
  const blocks = blocksOf(inner, depth + 1);
  for (const block of blocks) {
    const node = block.make();
    // The paragraphs of a tight list are only its text.
    if (node.tagName === "P" && block === blocks[0]) item.append(...node.childNodes);
    else item.append(node);
  }
  return item;
}

// ---- Tables ----------------------------------------------------------------------------------------------------

function isTable(lines, at) {
  const next = lines[at + 1];
  return lines[at].includes("|") && next !== undefined && CELLS.test(next) && next.includes("-") && next.includes("|");
}

function tableAt(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim() !== "") end += 1;
  const make = () => {
    const sides = cellsOf(lines[at + 1]).map((cell) => sideOf(cell.trim()));
    const row = (line, tag) =>
      element(
        "tr",
        {},
        cellsOf(line).map((cell, column) =>
          element(tag, sides[column] ? { class: sides[column] } : {}, inline(cell.trim())),
        ),
      );
    const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
    const table = element("table", {}, element("thead", {}, row(lines[at], "th")), element("tbody", {}, body));
    return element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table" }, table);
  };
  return [end, make];
}

function sideOf(cell) {
  if (!cell.endsWith(":")) return "";
  return cell.startsWith(":") ? "middle" : "right";
}

function cellsOf(line) {
  const text = line.trim();
  const cells = [];
  let cell = "";
  for (let at = text.startsWith("|") ? 1 : 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else if (text[at] === "|") {
      cells.push(cell);
      cell = "";
    } else cell += text[at];
  }
  if (cell.trim() !== "") cells.push(cell);
  return cells;
}
