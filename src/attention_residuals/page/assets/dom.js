// dom.js: elements, texts of tokens, and files. Text from a trace only ever becomes text.

function h(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const NAMED = { "\n": "\u23ce", "\r": "CR", "\t": "\u21e5", " ": "\u2423", "\u2423": "\u2423" };
const UNSEEN = /[\p{C}\p{Z}\p{Default_Ignorable_Code_Point}\u2800]/u;

// Cuts a text into [{text, mark}]: what cannot be seen (spaces, line ends, zero-width and control characters)
// is a mark with a sign or its number.
function visible(text, most = 48) {
  const pieces = [];
  const letters = [...text];
  const cut = letters.length > most ? letters.slice(0, most - 1) : letters;
  for (const letter of cut) {
    const number = `U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
    const mark = NAMED[letter] ?? (UNSEEN.test(letter) ? number : null);
    const last = pieces[pieces.length - 1];
    if (mark) pieces.push({ text: mark, mark: true });
    else if (last && !last.mark) last.text += letter;
    else pieces.push({ text: /^\p{M}/u.test(letter) ? `\u25cc${letter}` : letter, mark: false });
  }
  if (cut.length < letters.length) pieces.push({ text: "\u2026", mark: true });
  if (!pieces.length) pieces.push({ text: "\u2205", mark: true });
  return pieces;
}

const plainToken = (text, most) => visible(text, most).map((piece) => piece.text).join("");

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}\u2026` : text);

function tokenElement(text, most) {
  const pieces = visible(text, most).map((piece) =>
    piece.mark ? h("span", { class: piece.text.length > 1 ? "mark code" : "mark" }, piece.text) : piece.text);
  return h("bdi", { class: "word", dir: "auto" }, pieces);
}

function save(name, content, type) {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const address = URL.createObjectURL(blob);
  const link = h("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

// A cell of a CSV file: numbers in full, texts quoted; a text that a spreadsheet would run gets an apostrophe.
function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return Number.isNaN(value) ? "" : String(value);
  const text = /^[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]/.test(value) ? `'${value}` : value;
  return /[",\n\r']/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const csvText = (rows) => rows.map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";

// A table from rows of cells; the first row and the first column are headers.
function tableOf(rows, options = {}) {
  const [head, ...body] = rows;
  const cell = (tag, scope) => (content, n) =>
    h(tag, { scope, class: n && typeof content === "number" ? "number" : null },
      typeof content === "number" ? told(content) : content ?? "");
  return h("table", options,
    h("thead", {}, h("tr", {}, head.map(cell("th", "col")))),
    h("tbody", {}, body.map(([first, ...rest]) =>
      h("tr", {}, cell("th", "row")(first, 0), rest.map((one, n) => cell("td")(one, n + 1))))));
}

// Buttons of which one is chosen.
function choice(label, options, chosen, pick) {
  const buttons = options.map(([value, text, title]) =>
    h("button", { type: "button", "aria-pressed": String(value === chosen), title, onclick: () => pick(value) }, text));
  return h("div", { class: "choice", role: "group", "aria-label": label },
    h("span", { class: "quiet", "aria-hidden": "true" }, label), h("span", { class: "segments" }, buttons));
}

function field(label, options, chosen, pick) {
  const select = h("select", { onchange: (event) => pick(event.target.value) },
    options.map(([value, text]) => h("option", { value, selected: String(value) === String(chosen) }, text)));
  return h("label", { class: "field" }, h("span", { class: "quiet" }, label), select);
}

// How wide an element is. Asked for anew only when the window changes: an answer makes the browser lay out
// everything that was written since the last one.
let seenWidths = new WeakMap();
addEventListener("resize", () => { seenWidths = new WeakMap(); });

function seenWidth(element) {
  const width = seenWidths.get(element) || element.clientWidth;
  if (width) seenWidths.set(element, width);
  return width;
}
