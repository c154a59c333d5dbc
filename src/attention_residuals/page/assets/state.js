// state.js: what is chosen, in the address and back; and who is told.

const DEFAULTS = {
  trace: 0, row: 0, token: null, end: null, scope: "all", site: "", source: "",
  measure: "", tint: "cell", layout: "together", range: "full", theme: "",
};
const NUMBERS = ["trace", "row", "token", "end"];
const CHOICES = {
  scope: ["token", "text", "all"], layout: ["together", "apart"], range: ["full", "fit"], theme: ["", "light", "dark"],
};
const TOKENS_PER_PAGE = 512;
const state = { ...DEFAULTS };
const handlers = { select: [], show: [] };
let describeCell = null;

const pass = () => page.passes[state.trace];
const detail = () => ({ trace: state.trace, row: state.row, site: state.site, source: state.source, token: state.token });
const columnsOf = (one, measure) => (measure === "writer" ? one.writers : one.sources);

// The measures that this page has numbers for.
const measuresHere = () => Object.keys(MEASURES).filter((name) => name !== "effect" || page.effects.size);

// The numbers that a pass can tint its text by.
function tintsHere(one) {
  return [
    "cell", "entropy", "distance", "coherence", "embedding_share", "state_norm",
    ...(one.predictions || one.lens ? ["surprise"] : []),
    ...(page.pair?.prediction ? ["prediction"] : []),
  ];
}

// Makes a state that the payload has: unknown names and numbers fall back.
function settled(wanted) {
  const found = { ...wanted };
  const within = (number, count) => (Number.isInteger(number) && number >= 0 && number < count ? number : 0);
  found.trace = within(found.trace, page.passes.length);
  const one = page.passes[found.trace];
  if (!one) return found;
  found.row = within(found.row, one.rows);
  if (!(Number.isInteger(found.token) && found.token >= 0 && found.token < one.length)) {
    const real = one.real[found.row];
    found.token = (one.length <= TOKENS_PER_PAGE ? real[real.length - 1] : real[0]) ?? 0;
  }
  if (found.end !== null && (!Number.isInteger(found.end) || found.end < 0 || found.end >= one.length)) found.end = null;
  for (const [name, values] of Object.entries(CHOICES)) if (!values.includes(found[name])) found[name] = DEFAULTS[name];
  if (!tintsHere(one).includes(found.tint)) found.tint = "cell";
  if (!measuresHere().includes(found.measure)) found.measure = one.sites.some((site) => site.sources.length > 1) ? "weight" : "writer";
  if (!one.siteNumbers.has(found.site)) {
    const choices = one.sites.filter((site) => site.sources.length > 1);
    found.site = (choices[Math.floor(choices.length / 2)] ?? one.sites[one.sites.length - 1]).name;
  }
  const columns = columnsOf(one, found.measure);
  if (!columns.includes(found.source)) {
    const here = columns.filter((column) => one.cell(found.measure, one.siteNumbers.get(found.site), column));
    found.source = here[here.length - 1];
  }
  return found;
}

function fragment() {
  const changed = Object.keys(DEFAULTS).filter((name) => state[name] !== DEFAULTS[name]);
  return new URLSearchParams(changed.map((name) => [name, String(state[name])])).toString();
}

function fromFragment(text) {
  const found = { ...DEFAULTS };
  for (const [name, value] of new URLSearchParams(text)) {
    if (!Object.hasOwn(DEFAULTS, name)) continue;
    const known = NUMBERS.includes(name) ? /^\d{1,7}$/.test(value) : CHOICES[name]?.includes(value) ?? true;
    found[name] = !known ? DEFAULTS[name] : NUMBERS.includes(name) ? Number(value) : value;
  }
  return found;
}

// The address is written a moment later, so that holding an arrow key leaves one entry and not hundreds.
let writing = 0;
function writeFragment(entry) {
  clearTimeout(writing);
  const write = () => {
    const address = `#${fragment()}`;
    if (address === (location.hash || "#")) return;
    try {
      history[entry ? "pushState" : "replaceState"](null, "", address);
    } catch (error) {
      if (error.name !== "SecurityError") throw error; // a frame in a notebook has no address of its own
    }
  };
  if (entry) write();
  else writing = setTimeout(write, 150);
}

// Changes the state and shows it. Entry false leaves no step for the back button, null leaves the address alone.
async function set(changes, { entry = true } = {}) {
  const before = { ...state };
  Object.assign(state, settled({ ...state, ...changes }));
  applyTheme();
  if (entry !== null) writeFragment(entry);
  const moved = ["trace", "row", "site", "source", "token"].some((name) => state[name] !== before[name]);
  const painted = paint();
  if (moved) handlers.select.forEach((handler) => handler(detail()));
  await painted;
}

function applyTheme() {
  if (state.theme) document.documentElement.dataset.theme = state.theme;
  else delete document.documentElement.dataset.theme;
}
