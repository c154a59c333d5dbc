// live.js: the controls of the local server. What it knows of the page is AttnRes alone.
(() => {
"use strict";
const QUIET_MS = 500; // after the last key, before a text is run
const NONE = "No edits yet. Select a cell of the map below; its panel has buttons that drop or force the source.";
const ACT = "Each edit acts on the text, on what is generated, and on what the edits before it have left.";
const STYLE = `
#live { padding-bottom: 1rem; border-bottom: 1px solid var(--line); }
#live textarea { display: block; min-height: 5rem; resize: vertical; }
#live textarea, #live .said { font: 0.9rem/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
#live input { width: 5.5rem; padding: 0.22rem 0.5rem; }
#live .bar, #live details, #live .said, #live .scroll { margin: 0.5rem 0; }
#live .said { padding: 0.25rem 0.75rem; border-left: 3px solid var(--line); max-height: 20rem; overflow-y: auto; }
#live .error { white-space: pre-line; }
#live ol { margin: 0.25rem 0 0.5rem; padding-left: 1.5rem; }
#live td, #live th { padding: 0.1rem 0.75rem 0.1rem 0; text-align: left; white-space: nowrap; }
#live code { display: inline-block; max-width: min(16rem, 24vw); overflow: hidden; text-overflow: ellipsis; vertical-align: bottom; }
@media (min-width: 64rem) { #live .sides { display: grid; grid-template-columns: 3fr 2fr; gap: 0 3rem; } }
@media (min-width: 64rem) { #live h3[tabindex] { margin-top: 0; } }`;

function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}
const button = (label, run, options = {}) => make("button", { type: "button", onclick: run, ...options }, label);const times = (number) => (number === 1 ? "once" : `${number} times`);
const share = (number) => (number < 0.0005 ? "< 0.1 %" : `${(100 * number).toFixed(1)} %`);
const small = (number) => (number !== 0 && number < 0.001 ? number.toExponential(1) : number.toFixed(3));

const client = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
// Texts are kept for this tab alone: in the address they would stay in the browser's history.
const kept = { text: null, other: "", edits: [] };
const keep = () => sessionStorage.setItem("live", JSON.stringify({ ...kept, text: text.value, other: other.value }));

let running = null; // {kind, leave}
let effect = null; // of what is shown: names, kl, and the likeliest tokens before and after
let receipts = new Map(); // by edit
let typed = 0; // the timer

const number = (label, value, least, most, step) => {
  const input = make("input", { type: "number", value, min: least, max: most, step, inputmode: "decimal" });
  return { input, label: make("label", { class: "field" }, make("span", { class: "quiet" }, label), input) };
};
const text = make("textarea", { rows: 3, spellcheck: "false", "aria-describedby": "live-hint" });
const other = make("textarea", { rows: 3, spellcheck: "false" });
const count = number("New tokens", 32, 1, 1024, 1);
const temperature = number("Temperature", 0, 0, 10, 0.1);
const seed = number("Seed", 0, 0, Number.MAX_SAFE_INTEGER, 1);
const status = make("p", { class: "quiet", role: "status", "aria-live": "polite" });
const error = make("p", { class: "error", role: "alert", hidden: true });
const cancel = button("Cancel", () => ask("cancel").catch(unanswered), { hidden: true });
const said = make("div", { class: "said", role: "log", "aria-label": "Generated text", hidden: true });
const goOn = button("Take this as the text", takeGenerated, { hidden: true });
const edits = make("div");
const changed = make("div", { class: "changed", hidden: true });

const ask = (kind, fields = {}, signal = undefined) => fetch(kind, {
  method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ client, ...fields }), signal,
});

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line);
  }
}

// Asks, shows what happens, and returns the last event, or null where there is no result.
async function run(kind, fields, onToken = () => {}) {
  clearTimeout(typed);
  running?.leave.abort();
  const own = (running = { kind, leave: new AbortController() });
  const began = performance.now();
  tell("Asking ...");
  cancel.hidden = false;
  try {
    const response = await ask(kind, fields, own.leave.signal);
    if (!response.ok) return refuse(await response.json());
    for await (const event of eventsOf(response)) {
      if (own !== running) return null;
      if (event.type === "waiting") tell(`Waiting: ${event.ahead} before this one.`);
      else if (event.type === "started") tell(kind === "generate" ? "Generating ..." : "Running ...");
      else if (event.type === "token") onToken(event);
      else if (event.type === "error") return refuse(event);
      else if (event.type !== "done") return tell(event.type === "cancelled" ? "Cancelled." : "Replaced by a newer request.");
      else {
        await AttnRes.show(event.payload);
        tell(`Done in ${((performance.now() - began) / 1000).toFixed(1)} s.`);
        return { edits: [], ...fields, ...event };
      }
    }
    return unanswered();
  } catch (problem) {
    if (problem.name === "AbortError") return null;
    if (problem instanceof TypeError) return unanswered();
    throw problem;
  } finally {
    if (own === running) {
      running = null;
      cancel.hidden = true;
    }
  }
}

function tell(message) {
  status.textContent = message;
  error.hidden = true;
  return null;
}

function refuse({ got, expected, do: advice }) {
  status.textContent = "";
  error.textContent = `Got: ${got}\nExpected: ${expected}\nDo: ${advice}`;
  error.hidden = false;
  return null;
}

function unanswered() {
  return refuse({ got: "no answer", expected: "attnres view, running", do: "start it again and open the address that it prints" });
}

async function trace() {
  keep();
  if (said.firstChild?.textContent !== text.value) said.hidden = goOn.hidden = true; // it continues another text
  const found = await run("trace", { text: text.value, edits: kept.edits });
  if (found) showEffect(found, "as it is", "with edits");
}

async function generate() {
  keep();
  const before = make("span", { class: "quiet" }, text.value);
  const after = make("span", {});
  said.replaceChildren(before, after);
  said.hidden = false;
  goOn.hidden = true;
  const fields = {
    text: text.value, edits: kept.edits,
    max_new_tokens: count.input.valueAsNumber, temperature: temperature.input.valueAsNumber, seed: seed.input.valueAsNumber,
  };
  const found = await run("generate", fields, (event) => after.append(event.text));
  goOn.hidden = !after.textContent;
  if (found) {
    showEffect(found);
    const ended = { "end of text": "The model ended the text.", length: "As many tokens as were asked for, or fit." };
    status.textContent += ` ${ended[found.ended] ?? ""}`;
  }
}

function takeGenerated() {
  text.value = said.textContent;
  said.hidden = goOn.hidden = true;
  text.focus();
  trace();
}

async function compare() {
  keep();
  const found = await run("compare", { text: text.value, other: other.value });
  if (found) showEffect(found, "text", "other text");
}

const listed = (value) => (Array.isArray(value) ? value.join(", ") : String(value));

function told({ type, sites, part, sources, to, writer, positions }) {
  const where = `${listed(sites)}${part ? ` (${part})` : ""}, ${positions ? `token ${listed(positions)}` : "all tokens"}`;
  if (type === "Force") return `Force ${where}: read ${to} alone`;
  return type === "RemoveWriter" ? `Remove what ${writer} wrote at ${where}` : `Drop ${listed(sources)} at ${where}`;
}

const add = (edit) => change([...kept.edits.filter((one) => JSON.stringify(one) !== JSON.stringify(edit)), edit]);

async function change(made) {
  kept.edits = made;
  showEdits();
  await trace();
  // The button that was pressed is gone: whoever uses the keyboard goes on here.
  if (document.activeElement === document.body) edits.querySelector("h3").focus({ preventScroll: true });
}

function showEdits() {
  const line = (edit) => {
    const receipt = receipts.get(JSON.stringify(edit));
    const proof = receipt
      ? ` fired ${times(receipt.fired)}, at ${receipt.tokens === 1 ? "1 token" : `${receipt.tokens} tokens`}; changed a weight by up to ${small(receipt.largest_weight_change)}` +
        ` and a state by up to ${small(receipt.largest_state_change)} of its length `
      : " has no receipt yet ";
    const remove = () => change(kept.edits.filter((one) => one !== edit));
    return make("li", {}, told(edit), make("span", { class: "quiet" }, proof),
      button("Remove", remove, { "aria-label": `Remove the edit: ${told(edit)}` }));
  };
  edits.replaceChildren(make("h3", { tabindex: "-1" }, "Edits"), make("p", { class: "quiet" }, kept.edits.length ? ACT : NONE));
  if (!kept.edits.length) return;
  edits.append(make("ol", { class: "edits" }, ...kept.edits.map(line)), button("Remove all edits", () => change([])));
}

// The buttons of a selected cell; a column is a source, or a writer where writer weights are shown.
function actions({ site, source }) {
  const shown = AttnRes.payload.traces[0].sites.find((one) => one.name === site);
  if (!shown || !source) return [];
  const { scope, token, end, measure } = AttnRes.state;
  const base = { sites: shown.site, ...(shown.part === "in" ? {} : { part: shown.part }) };
  const span = end === null || end === token ? token : `${Math.min(token, end)}..${Math.max(token, end) + 1}`;
  const places = [...(scope === "token" ? [[`token ${span}`, { positions: [span] }]] : []), ["all tokens", {}]];
  return places.flatMap(([name, where]) => {
    const button = (verb, edit) => ({ label: `${verb} ${source} at ${site}, ${name}`, run: () => add({ ...edit, ...base, ...where }) });
    if (measure === "writer") return [button("Remove", { type: "RemoveWriter", writer: source })];
    return [button("Drop", { type: "Drop", sources: source }), button("Force", { type: "Force", to: source })];
  });
}

function showEffect(found, ...names) {
  receipts = new Map(found.edits.map((edit, place) => [JSON.stringify(edit), found.payload.receipts[place]]));
  effect = found.kl ? { names, ...found } : null;
  showEdits();
  showChange();
}

function showChange() {
  changed.hidden = !effect;
  if (!effect) return;
  const last = effect.kl.length - 1;
  const at = AttnRes.state.scope === "token" ? Math.min(AttnRes.state.token, last) : last;
  const most = effect.kl.indexOf(Math.max(...effect.kl));
  const name = (place) => `token ${place}, \u201c${effect.payload.traces[0].tokens.texts[0][place]}\u201d`;
  const cells = ([word, probability]) => [make("td", {}, make("code", {}, word)), make("td", { class: "number" }, share(probability))];
  const rows = effect.before[at].map((one, place) => make("tr", {}, ...cells(one), ...cells(effect.after[at][place])));
  const heads = effect.names.map((title) => make("th", { scope: "colgroup", colspan: "2" }, title));
  changed.replaceChildren(
    make("h3", {}, `Likeliest after ${name(at)}`),
    make("p", {}, `The predictions are ${small(effect.kl[at])} nats apart (KL), the largest distance of all tokens.`),
    make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows))),
  );
  if (at === most) return;
  changed.querySelector("p").textContent = `The predictions are ${small(effect.kl[at])} nats apart (KL).`;
  const go = () => AttnRes.set({ token: most, end: null, scope: "token" });
  changed.append(button(`Largest: ${small(effect.kl[most])} nats after ${name(most)}`, go));
}


const onEnter = (act) => (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  act();
};

function build() {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(STYLE);
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
  text.addEventListener("keydown", onEnter(trace));
  other.addEventListener("keydown", onEnter(compare));
  text.addEventListener("input", () => {
    clearTimeout(typed);
    if (running?.kind !== "generate") typed = setTimeout(trace, QUIET_MS);
  });
  const live = document.getElementById("live");
  live.setAttribute("aria-label", "Live controls");
  live.append(
    make("h2", {}, "Ask the model"),
    make("div", { class: "sides" },
      make("div", {},
        make("label", {}, "Text", text),
        make("p", { id: "live-hint", class: "quiet" }, "It runs when you stop typing, or on Ctrl+Enter."),
        make("div", { class: "bar" }, button("Run", trace), button("Generate", generate), count.label, temperature.label, seed.label),
        make("details", {}, make("summary", {}, "Compare with another text"),
          make("label", {}, "Other text, of as many tokens", other), make("div", { class: "bar" }, button("Compare", compare))),
        make("div", { class: "bar" }, status, cancel), error, said, goOn),
      make("div", {}, edits, changed)),
  );
  live.hidden = false;
}

async function begin() {
  await AttnRes.ready;
  build();
  AttnRes.cellActions(actions);
  AttnRes.on("select", showChange);
  const about = await (await fetch("about")).json();
  document.querySelector("#live h2").textContent = `Ask ${about.model}`;
  document.getElementById("live-hint").textContent += ` At most ${(about.max_tokens - 1).toLocaleString("en")} tokens.`;
  Object.assign(kept, JSON.parse(sessionStorage.getItem("live") ?? "{}"));
  text.value = kept.text ?? about.text;
  other.value = kept.other;
  showEdits();
  if (text.value !== about.text || kept.edits.length) trace();
}

begin().catch((problem) => {
  if (!(problem instanceof TypeError)) throw problem;
  unanswered();
});
})();
