// Making elements. What a text says never becomes markup: children are nodes, or become text nodes.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes, listeners (functions) and children. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

export function button(label, act, attributes = {}) {
  return element("button", { type: "button", click: act, ...attributes }, label);
}

export function byId(id) {
  return document.getElementById(id);
}

/** 1536 is "1.5 KiB". */
export function sizeText(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit === 0 || bytes >= 100 ? Math.round(bytes) : bytes.toFixed(1)} ${units[unit]}`;
}

export function countText(count) {
  return Math.round(count).toLocaleString("en");
}

/** Copies, and says so on the button for a moment. */
export function copyButton(textOf) {
  const made = button(
    "Copy",
    async () => {
      try {
        await navigator.clipboard.writeText(textOf());
        made.textContent = "Copied";
      } catch {
        made.textContent = "Not allowed";
      }
      setTimeout(() => (made.textContent = "Copy"), 1500);
    },
    { class: "quiet small" },
  );
  return made;
}
