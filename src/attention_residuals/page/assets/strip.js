// strip.js: the text, each token tinted by a number and with a bar of that length; a page of tokens at a time.

const strip = { page: -1, key: "", items: [], first: 0 };

function tintMeasure() {
  return state.measure === "effect" ? "weight" : state.measure;
}

function tintNeeds(one) {
  if (state.tint === "cell") return arraysOf(tintMeasure());
  if (state.tint === "surprise") return [one.predictions ? "predictions.log_probabilities" : "lens.log_probabilities"];
  return state.tint === "prediction" ? [] : [state.tint];
}

function tintOf(one, row, token) {
  const site = one.siteNumbers.get(state.site);
  if (state.tint === "cell") return one.value(tintMeasure(), site, state.source, [row * one.length + token]) ?? NaN;
  if (state.tint === "prediction") return page.pair.prediction[row * one.length + token];
  if (state.tint === "surprise") {
    if (token === 0) return NaN;
    const lead = one.predictions ? 0 : one.lens.sites.length - 1;
    return -one.at(one.predictions ? "predictions.log_probabilities" : "lens.log_probabilities", lead, row, token - 1);
  }
  return one.at(state.tint, site, row, token);
}

function tintLimits() {
  if (state.tint === "cell") return limitsNow(tintMeasure());
  if (STATISTICS[state.tint]?.fixed) return STATISTICS[state.tint].fixed;
  const one = pass();
  const key = `tint ${state.trace} ${state.tint} ${state.row} ${["distance", "state_norm"].includes(state.tint) ? state.site : ""}`;
  page.limits[key] ??= [0, one.real[state.row].reduce((most, token) => Math.max(most, tintOf(one, state.row, token) || 0), 0) || 1];
  return page.limits[key];
}

function tintTitle() {
  if (TINTS[state.tint]) return TINTS[state.tint].title({ ...state, measure: tintMeasure() });
  return `${STATISTICS[state.tint].title} at ${state.site}`;
}

const tintUnit = () => (state.tint === "cell" ? MEASURES[tintMeasure()].unit : STATISTICS[state.tint]?.unit ?? "nats");

function endsLine(text) {
  return /\n|\\n/.test(text);
}

function buildTokens(one, first, last) {
  strip.items = [];
  const parts = [];
  for (let token = first; token < last; token++) {
    const text = one.text(state.row, token);
    const padding = !one.tokens.mask[state.row][token];
    const special = !padding && !one.tokens.real[state.row][token];
    const bar = h("span", { class: "tint-bar", "aria-hidden": "true" });
    const item = h("span", {
      class: `token${special ? " special" : ""}${padding ? " padding" : ""}`, role: "option", id: `token-${token}`, tabindex: "-1",
    }, tokenElement(text, 40), bar);
    item.token = token;
    strip.items.push(item);
    parts.push(item);
    if (endsLine(text)) parts.push(h("br"));
  }
  strip.list.replaceChildren(...parts);
}

function paintStrip() {
  const one = pass();
  const number = Math.floor(state.token / TOKENS_PER_PAGE);
  const first = number * TOKENS_PER_PAGE;
  const last = Math.min(one.length, first + TOKENS_PER_PAGE);
  const key = `${page.shown} ${state.trace} ${state.row} ${number}`;
  const focused = strip.list.contains(document.activeElement);
  if (key !== strip.key) {
    buildTokens(one, first, last);
    Object.assign(strip, { key, first });
    hideCard();
  }
  const limits = tintLimits();
  const [low, high] = [state.token, state.end ?? state.token].sort((a, b) => a - b);
  for (const item of strip.items) {
    const value = tintOf(one, state.row, item.token);
    const known = !Number.isNaN(value);
    const fill = known ? colourOf(value, limits) : "";
    item.style.setProperty("background-color", fill || "transparent");
    item.style.setProperty("color", fill ? inkOn(fill) : "");
    const size = known ? Math.min(1, Math.abs(value) / Math.max(Math.abs(limits[0]), limits[1])) : 0;
    item.lastChild.style.setProperty("inline-size", `${(100 * size).toFixed(1)}%`);
    item.lastChild.classList.toggle("below", value < 0);
    const chosen = low <= item.token && item.token <= high;
    item.setAttribute("aria-selected", String(chosen));
    item.tabIndex = item.token === state.token ? 0 : -1;
    const kind = item.classList.contains("padding") ? ", padding" : item.classList.contains("special") ? ", special" : "";
    item.setAttribute("aria-label", `token ${item.token}, ${plainToken(one.text(state.row, item.token), 40)}${kind}: ${told(value)}`);
    if (focused && item.token === state.token) item.focus({ preventScroll: false });
  }
  strip.caption.textContent = `${tintTitle()}. The bar below a token has the length of its number.`;
  strip.legend.replaceChildren(legend(limits, tintUnit()));
  paintPager(one, number);
}

function paintPager(one, number) {
  const pages = Math.ceil(one.length / TOKENS_PER_PAGE);
  const turn = (step) => () => set({ token: Math.min(one.length - 1, Math.max(0, (number + step) * TOKENS_PER_PAGE)), end: null });
  strip.pager.hidden = pages === 1;
  strip.pager.replaceChildren(
    h("button", { type: "button", disabled: number === 0, onclick: turn(-1) }, "Earlier"),
    h("span", { class: "quiet" }, `tokens ${strip.first.toLocaleString("en")} to ${(strip.first + strip.items.length - 1).toLocaleString("en")} of ${one.length.toLocaleString("en")}`),
    h("button", { type: "button", disabled: number === pages - 1, onclick: turn(1) }, "Later"));
}

function chooseToken(token, extend, entry = true) {
  const last = pass().length - 1;
  const to = Math.min(last, Math.max(0, token));
  if (extend) return set({ end: state.end ?? state.token, token: to, scope: "token" }, { entry });
  return set({ token: to, end: null, scope: "token" }, { entry });
}

// The token in the next or the last line that stands nearest.
function beside(item, step) {
  const from = item.getBoundingClientRect();
  const others = strip.items.map((one) => [one, one.getBoundingClientRect()]).filter(([, box]) => step * (box.top - from.top) > 4);
  if (!others.length) return item.token;
  const line = others.reduce((best, [, box]) => (step * (box.top - best) < 0 ? box.top : best), step > 0 ? Infinity : -Infinity);
  const inLine = others.filter(([, box]) => Math.abs(box.top - line) < 4);
  return inLine.reduce((best, one) => (Math.abs(one[1].left - from.left) < Math.abs(best[1].left - from.left) ? one : best))[0].token;
}

function stripKey(event) {
  const item = event.target.closest(".token");
  if (!item || event.ctrlKey || event.metaKey || event.altKey) return;
  const moves = {
    ArrowRight: () => item.token + 1, ArrowLeft: () => item.token - 1, Home: () => 0, End: () => pass().length - 1,
    ArrowDown: () => beside(item, 1), ArrowUp: () => beside(item, -1),
    PageDown: () => item.token + TOKENS_PER_PAGE, PageUp: () => item.token - TOKENS_PER_PAGE,
  };
  if (event.key === "Escape") { hideCard(); if (state.end !== null) set({ end: null }); return; }
  if (!moves[event.key]) return;
  event.preventDefault();
  chooseToken(moves[event.key](), event.shiftKey, false);
}

addView({
  id: "text", title: "Text",
  here: () => true,
  needs: (one) => [...tintNeeds(one), ...arraysOf(tintMeasure())],
  build(body) {
    strip.key = "";
    strip.list = h("div", {
      class: "strip", role: "listbox", "aria-label": "Tokens of the text", "aria-multiselectable": "true",
      onkeydown: stripKey,
      onclick: (event) => { const item = event.target.closest(".token"); if (item) { item.focus(); chooseToken(item.token, event.shiftKey); } },
      onpointerover: (event) => { const item = event.target.closest(".token"); if (item && event.pointerType === "mouse") showCard(item); },
      onpointerleave: () => hideCard(),
      onfocusin: (event) => { const item = event.target.closest(".token"); if (item?.matches(":focus-visible")) showCard(item); },
      onfocusout: () => hideCard(),
    });
    strip.pager = h("div", { class: "bar pager" });
    strip.legend = h("div");
    strip.tools = h("div", { class: "bar" });
    strip.caption = this.caption;
    body.append(strip.tools, strip.list, strip.pager, strip.legend);
  },
  paint() {
    const options = tintsHere(pass()).map((name) => [name, name === "cell" ? "the selected cell" : STATISTICS[name]?.title.toLowerCase() ?? TINTS[name].title(state).replace(/^./, (letter) => letter.toLowerCase())]);
    strip.tools.replaceChildren(field("Tint by", options, state.tint, (tint) => set({ tint })));
    paintStrip();
  },
  rows() {
    const one = pass();
    const line = (_, token) => [state.row, one.tokens.positions[state.row][token], one.tokens.ids[state.row][token], one.tokens.texts ? one.text(state.row, token) : "", one.tokens.real[state.row][token], tintOf(one, state.row, token)];
    return [["row", "position", "token_id", "token", "real", tintTitle()], ...one.tokens.ids[state.row].map(line)];
  },
  picture() {
    const one = pass();
    const limits = tintLimits();
    const boxes = [];
    let [x, y] = [12, 44];
    for (const item of strip.items) {
      const text = plainToken(one.text(state.row, item.token), 40);
      const width = widthOf(text, 13, { mono: true }) + 8;
      if (x + width > 948) { x = 12; y += 30; }
      boxes.push({ x, y, width, text, value: tintOf(one, state.row, item.token) });
      x += width + 2;
      if (endsLine(one.text(state.row, item.token))) { x = 12; y += 30; }
    }
    const picture = new Picture(960, y + 76);
    picture.text(12, 20, tintTitle(), { size: 14, bold: true });
    for (const box of boxes) {
      const fill = Number.isNaN(box.value) ? null : colourOf(box.value, limits);
      picture.rect(box.x, box.y, box.width, 25, fill ? { fill } : { hatch: tone("line") });
      picture.text(box.x + 4, box.y + 11, box.text, { size: 13, mono: true, fill: fill ? inkOn(fill) : tone("ink") });
      const size = fill ? Math.min(1, Math.abs(box.value) / Math.max(Math.abs(limits[0]), limits[1])) : 0;
      if (size) picture.rect(box.x, box.y + 22, box.width * size, 3, { fill: inkOn(fill) });
    }
    drawScale(picture, 40, y + 48, limits, tintUnit());
    return picture;
  },
});
