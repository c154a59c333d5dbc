// scales.js: colours of numbers, and numbers as text. Lightness alone tells a number, so that no kind of colour
// blindness and no printer loses it; on paper and in the light low is pale, in the dark low is dark.

const RAMPS = {
  light: {
    one: ["#f5f2e6", "#e2e6c9", "#bdd6b5", "#8cbfab", "#579ea2", "#357a93", "#29557d", "#1c2e58"],
    two: ["#7a2a05", "#b9581a", "#e09a5c", "#f3d3b0", "#f4f3f0", "#c3d9ec", "#7fb0d8", "#3576b0", "#103f77"],
  },
  dark: {
    one: ["#1d2431", "#223755", "#285276", "#33738e", "#4d979d", "#86bca5", "#cdd9a6", "#fbf4cb"],
    two: ["#ffd2a0", "#f0a35e", "#bb6a2d", "#6b3f24", "#262a31", "#264866", "#3679ad", "#7db6e3", "#cfe6fa"],
  },
};

const onPaper = matchMedia("print");
const inTheDark = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  if (onPaper.matches) return false;
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : inTheDark.matches;
}

const parts = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

function mixed(ramp, share) {
  const place = Math.min(1, Math.max(0, share)) * (ramp.length - 1);
  const low = Math.min(ramp.length - 2, Math.floor(place));
  const [a, b] = [parts(ramp[low]), parts(ramp[low + 1])];
  return "#" + a.map((one, n) => Math.round(one + (b[n] - one) * (place - low)).toString(16).padStart(2, "0")).join("");
}

function luminance(colour) {
  const [r, g, b] = parts(colour).map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

// Black or white, whichever can be read; one of them always reaches 4.5.
const inkOn = (fill) => (contrast(fill, "#000000") >= contrast(fill, "#ffffff") ? "#000000" : "#ffffff");

// The colour of a number between limits: [low, high] around 0 has two hues, all else one.
function colourOf(number, [low, high]) {
  const ramp = RAMPS[isDark() ? "dark" : "light"];
  return low < 0 ? mixed(ramp.two, (number - low) / (high - low)) : mixed(ramp.one, number / high);
}

// A colour of the style sheet.
const tone = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const MINUS = "\u2212";
const signed = (text) => text.replace(/^-/, MINUS);

// As short as a cell is small: .42, −.07, 1.3, 12.
function brief(number) {
  if (number === undefined) return "";
  if (Number.isNaN(number)) return "\u2013";
  const size = Math.abs(number);
  if (size >= 99.5) return signed(number.toFixed(0));
  if (size >= 9.95) return signed(number.toFixed(0));
  if (size >= 0.995) return signed(number.toFixed(size >= 1.0001 ? 1 : 0));
  if (size < 0.0005) return "0";
  return signed(number.toFixed(size < 0.0095 ? 3 : 2)).replace(/0(?=\.)/, "");
}

// With the digits that a person compares by.
function told(number) {
  if (number === undefined) return "not a source here";
  if (number === null || Number.isNaN(number)) return "not defined";
  const size = Math.abs(number);
  if (size === 0) return "0";
  return signed(size >= 1e-4 && size < 1e5 ? String(+number.toPrecision(4)) : number.toExponential(3));
}

const percent = (share) => (share >= 0.995 ? "100 %" : share < 0.001 ? "<0.1 %" : `${(100 * share).toFixed(1)} %`);
