// main.js: the page as a whole.

const whole = { turn: 0 };

function facts() {
  const [one] = page.passes;
  const rule = Object.entries(one.rule).filter(([name, value]) => name !== "type" && value !== null).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
  const about = one.about;
  const list = [
    ["rule", [one.rule.type, ...rule].join(", ")],
    ["sites", String(one.sites.length)],
    ["tokens", one.rows > 1 ? `${one.rows} texts of ${one.length}` : one.length.toLocaleString("en")],
    ["width", String(one.width)],
    ["numbers", about.dtype?.replace("torch.", "")],
    ["checkpoint", about.checkpoint?.slice(0, 12)],
    ["recorded with", [about.attention_residuals && `attention-residuals ${about.attention_residuals}`, about.torch && `torch ${about.torch}`].filter(Boolean).join(", ")],
  ];
  return h("dl", { class: "chips" }, list.filter(([, value]) => value).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function controls() {
  const one = pass();
  const texts = one.tokens.ids.map((_, row) => [row, `${row}: ${one.tokens.ids[row].slice(0, 9).map((_, token) => one.text(row, token)).map((text) => plainToken(text, 12)).join("").slice(0, 36)}`]);
  const scopes = [["token", state.end === null ? "token" : "span"], ["text", "text"], ...(one.rows > 1 ? [["all", "all texts"]] : [])];
  const scope = one.rows > 1 || state.scope !== "all" ? state.scope : "text";
  return [
    page.passes.length > 1 ? choice("Pass", page.passes.map((each, n) => [n, each.name]), state.trace, (trace) => set({ trace })) : null,
    one.rows > 1 ? field("Text", texts, state.row, (row) => set({ row: Number(row), token: 0, end: null, scope: "text" })) : null,
    choice("Numbers of", scopes, scope, (picked) => set({ scope: picked })),
    choice("Measure", measuresHere().map((name) => [name, MEASURES[name].title.toLowerCase(), MEASURES[name].is]), state.measure, (measure) => set({ measure })),
    field("Theme", [["", "as the system"], ["light", "light"], ["dark", "dark"]], state.theme, (theme) => set({ theme })),
  ].filter(Boolean);
}

function explained(found, title) {
  return [h("dt", {}, title), h("dd", {}, h("p", {}, found.is), h("p", { class: "trap" }, h("strong", {}, "But: "), found.trap))];
}

function help() {
  const open = whole.help?.open ?? false;
  whole.help = h("details", { class: "help", id: "help", open },
    h("summary", {}, "What am I looking at?"),
    whole.now = h("div", { class: "now" }),
    h("h3", {}, "How to read the maps"), h("ul", {}, HOW_TO_READ.map((text) => h("li", {}, text))),
    h("h3", {}, "All numbers"),
    h("dl", {}, Object.values(MEASURES).map((one) => explained(one, one.title)), Object.values(STATISTICS).map((one) => explained(one, one.title)),
      ["surprise", "prediction"].map((name) => explained(TINTS[name], TINTS[name].title(state)))));
  return whole.help;
}

function build() {
  const [one] = page.passes;
  const shown = views.filter((view) => view.here());
  whole.shown = shown;
  whole.controls = h("div", { class: "controls bar", role: "toolbar", "aria-label": "What is shown" });
  whole.status = h("p", { class: "sr", role: "status", "aria-live": "polite" });
  const frames = Object.fromEntries(shown.map((view) => [view.id, framed(view)]));
  const { text, map: sites, panel: chosen, story, ...others } = frames;
  const intro = document.querySelector(".report") ? h("h2", { class: "explore" }, `To explore: the routing${one.name ? ` of ${one.name}` : ""}`) : "";
  document.getElementById("views").replaceChildren(
    intro, facts(), ...one.cautions.map((caution) => h("p", { class: "caution" }, h("strong", {}, "Caution: "), caution)),
    help(), whole.controls, whole.status, h("div", { class: "columns" }, text, sites, chosen, story), ...Object.values(others));
}

// Acts; where the control that has the focus is made anew by that, the one in its place gets it.
function keepingFocus(act) {
  const had = document.activeElement;
  const part = had?.closest(".view, .controls");
  const within = () => [...part.querySelectorAll("button, select")];
  const place = part ? within().indexOf(had) : -1;
  act();
  if (place < 0 || had.isConnected) return;
  const now = within();
  const next = now[place]?.disabled ? now[place].parentElement.querySelector(":enabled") : now[place];
  next?.focus({ preventScroll: true });
}

function paintControls() {
  whole.controls.replaceChildren(...controls());
  const measure = MEASURES[state.measure];
  whole.now.replaceChildren(h("dl", {}, explained(measure, `Now shown: ${measure.title.toLowerCase()}`)));
  const site = pass().siteNumbers.get(state.site);
  whole.status.textContent = `${state.source} in ${state.site}, ${scopeText()}: ${MEASURES[state.measure].title} ${told(pass().value(state.measure, site, state.source, pass().places(state)))}`;
}

async function paint() {
  if (!page.passes.length) return;
  const turn = ++whole.turn;
  await Promise.all(page.passes.flatMap((one) => whole.shown.map((view) => one.need(view.needs(one)))));
  if (turn !== whole.turn) return;
  keepingFocus(() => {
    for (const view of whole.shown) view.paint();
    paintControls();
  });
  document.body.dataset.painted = String(turn);
}

async function show(payload) {
  if (payload.format !== 1) throw new Error(`format ${payload.format}: this page shows format 1`);
  await take(payload);
  page.shown = (page.shown ?? 0) + 1;
  if (!page.passes.length) return;
  Object.assign(state, settled(state));
  build();
  await paint();
  handlers.show.forEach((handler) => handler(detail()));
}

function repaint() {
  page.limits = page.passes.length ? limitsOf(page.passes) : {};
  return paint();
}

for (const query of [inTheDark, onPaper]) query.addEventListener("change", repaint);
addEventListener("popstate", () => {
  clearTimeout(writing);
  set(fromFragment(location.hash.slice(1)), { entry: null });
});
addEventListener("keydown", (event) => { if (event.key === "Escape") hideCard(); });
addEventListener("scroll", hideCard, { passive: true });

globalThis.AttnRes = {
  show, state, set,
  get payload() { return page.payload; },
  on(event, handler) { handlers[event].push(handler); },
  cellActions(describe) { describeCell = describe; if (page.passes.length) paint(); },
};
Object.assign(state, fromFragment(location.hash.slice(1)));
applyTheme();
AttnRes.ready = show(JSON.parse(document.getElementById("payload").textContent));
AttnRes.ready.catch((problem) => {
  const advice = globalThis.DecompressionStream ? problem : "This browser cannot unpack them: use one of 2023 or later.";
  document.getElementById("views").replaceChildren(h("p", { class: "error", role: "alert" }, `The views cannot be shown. ${advice}`));
});
