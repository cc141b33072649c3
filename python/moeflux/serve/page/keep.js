// What the browser keeps: conversations, each under a name of its own, and settings. Nothing of it leaves the browser.

import { Conversation } from "./conversation.js";

const PREFIX = "moeflux.conversation.";
const SETTINGS = "moeflux.settings";

export const DEFAULTS = {
  instructions: "",
  temperature: "",
  topP: "",
  longest: "",
  thinking: "",
  key: "",
  tools: "",
  look: "",
  side: true,
};

/** Whether there was room for it. */
export function keep(conversation) {
  return put(PREFIX + conversation.id, conversation);
}

export function forget(conversation) {
  localStorage.removeItem(PREFIX + conversation.id);
}

export function forgetAll() {
  for (const name of names()) localStorage.removeItem(name);
}

/** The one that changed last comes first. What cannot be read is left out. */
export function conversations() {
  const found = [];
  for (const name of names()) {
    const kept = get(name);
    if (kept && typeof kept === "object" && kept.id) found.push(new Conversation(kept));
  }
  return found.sort((one, other) => other.changed - one.changed);
}

export function settings() {
  return { ...DEFAULTS, ...get(SETTINGS) };
}

export function keepSettings(values) {
  return put(SETTINGS, values);
}

function names() {
  return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
}

function get(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

function put(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
