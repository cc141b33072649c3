// The marks inside a line of Markdown: code, emphasis, links. No tag comes out but those in this file.

import { element } from "./dom.js";

const DEEPEST = 8;
const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const SPECIAL = /[\\`*_~[!<\n]|https?:\/\//g;
const ESCAPED = /[!-/:-@[-`{-~]/;
const BARE = /https?:\/\/[^\s<>"`]+/y;

/** Nodes of a text. */
export function inline(text, depth = 0) {
  const nodes = [];
  const missing = new Set(); // marks that nothing closes from here on
  let plain = "";
  let at = 0;
  const put = (node) => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    nodes.push(node);
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    const next = found ? found.index : text.length;
    plain += text.slice(at, next);
    at = next;
    if (!found) break;
    const [end, node] = markAt(text, at, depth, missing);
    if (typeof node === "string") plain += node;
    else put(node);
    at = end;
  }
  if (plain) nodes.push(document.createTextNode(plain));
  return nodes;
}

/** [where it ends, a node or plain text] of what begins with a special character. */
function markAt(text, at, depth, missing) {
  const first = text[at];
  if (first === "\\") return escapedAt(text, at);
  if (first === "\n")
    return /[^ ] {2}$/.test(text.slice(Math.max(0, at - 3), at)) ? [at + 1, element("br")] : [at + 1, "\n"];
  if (first === "`") return codeAt(text, at, missing);
  if (first === "h") return bareAt(text, at);
  if (first === "<") return angleAt(text, at);
  if (first === "!" && text[at + 1] !== "[") return [at + 1, "!"];
  if (depth < DEEPEST) {
    if (first === "[" || first === "!") return linkAt(text, at, depth, missing);
    for (const [mark, tag] of MARKS) {
      if (!text.startsWith(mark, at)) continue;
      const end = opens(text, at, mark) ? closing(text, at + mark.length + 1, mark, missing) : -1;
      if (end >= 0) return [end + mark.length, element(tag, {}, inline(text.slice(at + mark.length, end), depth + 1))];
    }
  }
  let end = at + 1;
  while (text[end] === first && first !== "[" && first !== "!") end += 1;
  return [end, text.slice(at, end)];
}

function escapedAt(text, at) {
  const next = text[at + 1];
  if (next === "\n") return [at + 2, element("br")];
  return next !== undefined && ESCAPED.test(next) ? [at + 2, next] : [at + 1, "\\"];
}

function codeAt(text, at, missing) {
  let size = 1;
  while (text[at + size] === "`") size += 1;
  const mark = "`".repeat(size);
  let end = missing.has(mark) ? -1 : text.indexOf(mark, at + size);
  while (end >= 0 && text[end + size] === "`") {
    let past = end + size;
    while (text[past] === "`") past += 1;
    end = text.indexOf(mark, past);
  }
  if (end < 0) {
    missing.add(mark);
    return [at + size, mark];
  }
  const code = text.slice(at + size, end).replaceAll("\n", " ");
  const padded = code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
  return [end + size, element("code", {}, padded ? code.slice(1, -1) : code)];
}

// ---- Emphasis --------------------------------------------------------------------------------------------------

function isSpace(character) {
  return character === undefined || character.trim() === "";
}

function isWord(character) {
  return character !== undefined && /[\p{L}\p{N}_]/u.test(character);
}

function opens(text, at, mark) {
  return !isSpace(text[at + mark.length]) && !(mark[0] === "_" && isWord(text[at - 1]));
}

/** Where a mark closes. Whether it does there is no matter of where it was opened, so what is missing stays missing. */
function closing(text, from, mark, missing) {
  if (missing.has(mark)) return -1;
  for (let end = text.indexOf(mark, from); end >= 0; end = text.indexOf(mark, end + 1)) {
    if (isSpace(text[end - 1]) || (mark[0] === "_" && isWord(text[end + mark.length]))) continue;
    // A single mark is not half of a double one.
    if (mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark)) {
      if (text[end - 1] !== mark) end += 1;
      continue;
    }
    while (mark.length === 2 && text[end + 2] === mark[0]) end += 1;
    return end;
  }
  missing.add(mark);
  return -1;
}

// ---- Links -----------------------------------------------------------------------------------------------------

function linkAt(text, at, depth, missing) {
  const image = text[at] === "!";
  const begin = at + (image ? 2 : 1);
  const middle = missing.has("](") ? -1 : text.indexOf("](", begin);
  const end = middle < 0 || missing.has(")") ? -1 : text.indexOf(")", middle + 2);
  if (middle < 0) missing.add("](");
  else if (end < 0) missing.add(")");
  if (end < 0) return [begin, text.slice(at, begin)];
  const address = text
    .slice(middle + 2, end)
    .trim()
    .split(/\s/, 1)[0];
  const label = text.slice(begin, middle);
  // No image is fetched: it would tell another server that somebody reads this.
  const said = image ? [document.createTextNode(label || "image")] : inline(label, depth + 1);
  const link = linkTo(address, said);
  for (const inner of link?.querySelectorAll("a") ?? []) inner.replaceWith(...inner.childNodes);
  return [end + 1, link ?? element("span", {}, said, ` (${address})`)];
}

function bareAt(text, at) {
  BARE.lastIndex = at;
  const found = BARE.exec(text);
  if (!found) return [at + 1, "h"];
  const address = found[0].replace(/[.,;:!?)\]}'*_~]{1,20}$/, "");
  const link = linkTo(address, [document.createTextNode(address)]);
  return link ? [at + address.length, link] : [at + found[0].length, found[0]];
}

function angleAt(text, at) {
  const found = /^<(https?:\/\/[^\s<>]{1,2000})>/.exec(text.slice(at, at + 2010));
  const link = found && linkTo(found[1], [document.createTextNode(found[1])]);
  return link ? [at + found[0].length, link] : [at + 1, "<"];
}

/** A link, if it leads to the web or to somebody's post. */
function linkTo(address, said) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer" }, said);
}
