// Uses the page as people do: node drive.mjs FOLDER URL LOCKED-URL KEY [WORDS]. FOLDER has the packages, and gets the pictures.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, url, lockedUrl, key, only = ""] = process.argv.slice(2);
const require = createRequire(`${folder}/`);
const { chromium } = require("playwright-core");
const { default: packed } = await import(pathToFileURL(require.resolve("@sparticuz/chromium")));

// The arguments that the package proposes are for machines without shared memory, and turn rules of the web off.
const args = ["--no-sandbox", "--disable-gpu"];
const browser = await chromium.launch({ executablePath: await packed.executablePath(), args }).catch((error) => {
  console.log(error.message);
  process.exit(3); // it does not start here
});
const faults = [];

/** A page of its own, with an empty memory. What it complains about, or asks of others, is a fault. */
async function fresh(options = {}) {
  const context = await browser.newContext({ viewport: { width: 1360, height: 860 }, ...options });
  const page = await context.newPage();
  page.on("pageerror", (error) => faults.push(`error: ${error.message}`));
  page.on("console", (line) => ["error", "warning"].includes(line.type()) && faults.push(`console: ${line.text()}`));
  page.on("request", (request) => request.url().startsWith(url) || faults.push(`asked for ${request.url()}`));
  page.on("dialog", (dialog) => dialog.accept());
  await page.goto(url);
  await known(page);
  return page;
}

async function known(page) {
  await until(async () => await page.locator("#model").textContent());
}

/** Waits until it is so. (The page's policy forbids what waitForFunction does.) */
async function until(condition, seconds = 60) {
  const end = Date.now() + seconds * 1000;
  while (!(await condition())) {
    assert.ok(Date.now() < end, `not so after ${seconds} s: ${condition}`);
    await new Promise((done) => setTimeout(done, 20));
  }
}

async function ask(page, text) {
  await page.fill("#ask", text);
  await page.press("#ask", "Enter");
}

async function over(page) {
  await until(async () => (await page.locator("#send").textContent()) === "Send");
}

function last(page) {
  return page.locator(".message.assistant").last();
}

async function says(page, words) {
  await page.locator(".message.assistant").last().waitFor();
  await until(async () => (await last(page).innerText()).includes(words));
}

const picture = (page, name) => page.screenshot({ path: `${folder}/${name}.png`, caret: "initial" });

// ---- What is held to -------------------------------------------------------------------------------------------

const tests = {
  async "an answer streams, and says how fast"() {
    const page = await fresh();
    await picture(page, "empty");
    await ask(page, "Say something in markdown please");
    await page.waitForSelector(".message.live .prose h4");
    const early = (await last(page).innerText()).length;
    assert.equal(await page.locator("#send").textContent(), "Stop");
    await page.waitForSelector(".message.live .prose pre");
    assert.ok((await last(page).innerText()).length > early);
    await over(page);
    for (const tag of ["h4", "strong", "em", "ol > li > ul > li", "pre", "table td.right", "blockquote"]) {
      assert.ok(await last(page).locator(tag).count(), tag);
    }
    assert.equal(await last(page).locator("a").getAttribute("rel"), "noopener noreferrer");
    await page.waitForSelector(".dot.found");
    assert.match(await page.locator("#side").innerText(), /tokens, the first after/);
    assert.ok((await page.locator(".dot.read").count()) > 0);
    await until(async () => /experts were picked/.test(await page.locator(".heat").getAttribute("aria-label")));
    const drawn = await page.locator(".heat").evaluate((picture) => {
      const { data } = picture.getContext("2d").getImageData(0, 0, picture.width, picture.height);
      return data.filter((value, at) => at % 4 === 3 && value > 0).length / (data.length / 4);
    });
    assert.ok(drawn > 0.02 && drawn < 0.9, drawn);
    assert.match(await page.locator("#side").innerText(), /most often, [\d,]+ times, expert \d+ of layer \d+/);
    assert.ok((await page.locator(".bar span").count()) > 3);
    assert.match(await page.locator(".legend").innerText(), /experts\s+[\d.]+ MiB/);
    await page.locator("#scroll").evaluate((each) => each.scrollTo(0, 0));
    await picture(page, "answer");
  },

  async "an answer stops, and what came is kept"() {
    const page = await fresh();
    await ask(page, "Write a long text");
    await says(page, "Sentence 5");
    await page.click("#send");
    await over(page);
    const text = await last(page).innerText();
    assert.match(text, /You stopped the answer here/);
    assert.ok(!text.includes("Sentence 399"));
    await page.reload();
    await page.locator(".conversations .title").first().click();
    assert.match(await last(page).innerText(), /Sentence 5/);
    await ask(page, "Write a long text again");
    await page.waitForSelector(".message.live .prose p");
    await page.keyboard.press("Escape");
    await over(page);
  },

  async "a message is edited, and both ways are kept"() {
    const page = await fresh();
    await ask(page, "something short");
    await over(page);
    await ask(page, "something to think about");
    await over(page);
    const first = page.locator(".message.user").first();
    await first.hover();
    await first.getByRole("button", { name: "Edit" }).click();
    await page.getByLabel("Edit the message").fill("Use markdown instead");
    await page.keyboard.press("Enter");
    await over(page);
    assert.equal(await page.locator(".message").count(), 2);
    assert.match(await first.innerText(), /2 of 2/);
    await page.getByRole("button", { name: "The version before" }).first().click();
    assert.equal(await page.locator(".message").count(), 4);
    assert.match(await page.locator(".messages").innerText(), /A short answer/);
    await last(page).getByRole("button", { name: "Try again" }).click();
    await over(page);
    assert.match(await last(page).innerText(), /2 of 2/);
    await picture(page, "versions");
    await page.reload();
    await page.locator(".conversations .title").first().click();
    assert.match(await last(page).innerText(), /2 of 2/);
  },

  async "thoughts are folded"() {
    const page = await fresh();
    await ask(page, "something to think about");
    await over(page);
    const thought = last(page).locator("details.thought");
    assert.equal(await thought.getAttribute("open"), null);
    assert.ok(!(await last(page).innerText()).includes("weigh"));
    await thought.locator("summary").press("Enter");
    await thought.locator("strong").waitFor();
    await picture(page, "thoughts");
  },

  async "calls are shown, and their results are given"() {
    const page = await fresh();
    await page.click("#settings-open");
    await page.getByLabel("Tools").fill("{");
    await page.getByRole("button", { name: "Save" }).click();
    assert.match(await page.locator("#settings-fault").innerText(), /expected a JSON list/);
    const schema = { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } } };
    await page
      .getByLabel("Tools")
      .fill(JSON.stringify([{ type: "function", function: { name: "weather", parameters: schema } }]));
    await picture(page, "settings");
    await page.getByRole("button", { name: "Save" }).click();
    await ask(page, "How is the weather?");
    await over(page);
    assert.match(await last(page).locator(".call").innerText(), /weather[\s\S]*"city": "Bern"/);
    await picture(page, "call");
    await page.getByLabel("Result of weather").fill("sunny");
    await page.getByRole("button", { name: "Send the result" }).click();
    await over(page);
    assert.match(await last(page).innerText(), /In Bern it is sunny/);
  },

  async "what a model writes never runs"() {
    const page = await fresh();
    await ask(page, "Be hostile");
    await says(page, "Hostile ends");
    await over(page);
    const answer = last(page);
    assert.equal(await page.evaluate(() => window.broken), undefined);
    const tags = await answer.evaluate((node) => [
      ...new Set([...node.querySelectorAll("*")].map((each) => each.localName)),
    ]);
    for (const tag of ["script", "img", "svg", "iframe", "style", "object", "form", "base", "meta", "b"]) {
      assert.ok(!tags.includes(tag), tag);
    }
    const attributes = await answer.evaluate((node) =>
      [...node.querySelectorAll("*")].flatMap((each) => each.getAttributeNames()),
    );
    assert.deepEqual(
      attributes.filter((name) => name.startsWith("on") || ["src", "style", "srcdoc"].includes(name)),
      [],
    );
    const links = await answer.locator("a").evaluateAll((found) => found.map((each) => each.protocol));
    assert.ok(links.length > 0 && links.every((protocol) => protocol === "https:"), links.join());
    for (const words of ["<script>window.broken = 1</script>", "javascript:window.broken=5", "<base href="]) {
      assert.ok((await answer.innerText()).includes(words), words);
    }
    await answer.locator("a").first().hover();
    assert.equal(await page.evaluate(() => window.broken), undefined);
    await picture(page, "hostile");
  },

  async "the policy holds against the page itself"() {
    const page = await fresh();
    const refused = await page.evaluate(() => {
      try {
        document.body.innerHTML = "<b>x</b>";
        return false;
      } catch {
        return true;
      }
    });
    assert.ok(refused);
    faults.length = 0; // the browser complains about that, as it should
  },

  async "a fault of the server is told, and can be tried again"() {
    const page = await fresh();
    await ask(page, "Be broken");
    await over(page);
    assert.match(await last(page).innerText(), /the disk: expected bytes, found none/);
    assert.equal(await last(page).getByRole("button", { name: "Try again" }).count(), 1);
  },

  async "a key is asked for where one is needed"() {
    const page = await fresh();
    await page.goto(lockedUrl);
    await page.locator("#settings-fault", { hasText: "asks for a key" }).waitFor();
    await page.keyboard.type(key);
    await page.keyboard.press("Enter");
    await known(page);
    await ask(page, "something short");
    await over(page);
    await says(page, "A short answer.");
    assert.ok(
      faults.every((fault) => fault.includes("401") || fault.includes(lockedUrl)),
      faults.join(),
    );
    faults.length = 0;
  },

  async "hard Markdown takes no longer than its length"() {
    const page = await fresh();
    const parts = [
      "[",
      "**a ",
      "*a_b",
      "`` ` ",
      "![](",
      "> ",
      "- ",
      "- \u2028",
      "\n- a\n\n",
      "|-|\n",
      "<",
      "# ",
      "~~~",
      "https://",
    ];
    const made = page.evaluate(async (parts) => {
      const { markdownOf } = await import("/page/markdown.js");
      for (const part of parts) markdownOf(part.repeat(200000 / part.length));
      markdownOf(`- ${" ".repeat(200000)}\u2028`);
      return true;
    }, parts);
    const impatient = new Promise((done) => setTimeout(() => done("it hangs"), 60000));
    assert.equal(await Promise.race([made, impatient]), true);
  },

  async "it is used by the keyboard alone"() {
    const page = await fresh();
    await page.keyboard.type("something short");
    await page.keyboard.press("Enter");
    await over(page);
    assert.equal(await page.locator("#status").innerText(), "The answer is complete.");
    const seen = new Set();
    for (let at = 0; at < 40; at += 1) {
      await page.keyboard.press("Tab");
      seen.add(await page.evaluate(() => document.activeElement.id || document.activeElement.textContent));
    }
    for (const name of ["new", "settings-open", "side-toggle", "scroll", "ask", "Edit", "Try again", "Copy"]) {
      assert.ok(seen.has(name), name);
    }
    const nameless = await page
      .locator("button, input, textarea, select")
      .evaluateAll((found) =>
        found
          .filter((each) => !each.textContent.trim() && !each.getAttribute("aria-label") && !each.labels?.length)
          .map((each) => each.outerHTML),
      );
    assert.deepEqual(nameless, []);
  },

  async "several conversations are kept, and deleted"() {
    const page = await fresh();
    await ask(page, "First one, short");
    await over(page);
    await page.click("#new");
    await ask(page, "Second one, short");
    await over(page);
    assert.deepEqual(await page.locator(".conversations .title").allInnerTexts(), [
      "Second one, short",
      "First one, short",
    ]);
    await page.getByRole("button", { name: "Delete Second one, short" }).click();
    assert.deepEqual(await page.locator(".conversations .title").allInnerTexts(), ["First one, short"]);
    assert.equal(await page.locator(".message").count(), 0);
  },

  async "it is dark where the system is"() {
    const page = await fresh({ colorScheme: "dark" });
    await ask(page, "Say something in markdown please");
    await over(page);
    await page.waitForSelector(".dot.found");
    const paper = await page.evaluate(() => getComputedStyle(document.documentElement).backgroundColor);
    assert.ok(
      paper
        .match(/\d+/g)
        .slice(0, 3)
        .every((part) => Number(part) < 60),
      paper,
    );
    await page.waitForTimeout(700);
    await picture(page, "dark");
    await page.click("#settings-open");
    await page.getByLabel("Look").selectOption("light");
    await page.getByRole("button", { name: "Save" }).click();
    const light = await page.evaluate(() => getComputedStyle(document.documentElement).backgroundColor);
    assert.ok(
      light
        .match(/\d+/g)
        .slice(0, 3)
        .every((part) => Number(part) > 200),
      light,
    );
  },

  async "it fits a phone"() {
    const page = await fresh({ viewport: { width: 375, height: 740 }, hasTouch: true, isMobile: true });
    await ask(page, "Say something in markdown please");
    await over(page);
    const wide = () => page.evaluate(() => document.documentElement.scrollWidth);
    await picture(page, "phone");
    const beyond = await page.evaluate(() =>
      [...document.querySelectorAll(".talk *")]
        .filter((each) => each.getBoundingClientRect().right > 376 && !each.closest(".wide, pre"))
        .map((each) => each.outerHTML.slice(0, 80)),
    );
    assert.deepEqual(beyond, []);
    assert.equal(await wide(), 375);
    await page.click("#shelf-open");
    await page.waitForTimeout(300);
    await picture(page, "phone-conversations");
    await page.keyboard.press("Escape");
    await page.click("#side-toggle");
    await page.waitForTimeout(900);
    await picture(page, "phone-engine");
    await page.click("#side-close");
    await page.click("#shelf-open");
    await page.click("#settings-open");
    await page.waitForTimeout(300);
    await picture(page, "phone-settings");
    await page.keyboard.press("Escape");
    await page.click("#shelf-close");
    assert.equal(await page.locator("#side").isVisible(), false);
    assert.equal(await wide(), 375);
  },
};

let failed = 0;
for (const [name, test] of Object.entries(tests).filter(([name]) => name.includes(only))) {
  faults.length = 0;
  try {
    await test();
    assert.deepEqual(faults, []);
    console.log(`ok      ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED  ${name}\n${error.stack}`);
  }
  for (const context of browser.contexts()) await context.close();
}
await browser.close();
process.exit(failed ? 1 : 0);
