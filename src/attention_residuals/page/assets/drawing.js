// drawing.js: pictures as lists of shapes, drawn on a canvas or written as SVG; both show the same.

const FONT = 'system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif';
const MONO = 'ui-monospace, "SF Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace';

class Picture {
  constructor(width, height) {
    Object.assign(this, { width: Math.ceil(width), height: Math.ceil(height), shapes: [] });
  }
  rect(x, y, w, h, look) { this.shapes.push({ kind: "rect", x, y, w, h, ...look }); }
  text(x, y, text, look) { this.shapes.push({ kind: "text", x, y, text, size: 12, fill: tone("ink"), ...look }); }
  line(points, look) { this.shapes.push({ kind: "line", points, width: 1, ...look }); }
  mark(x, y, form, look) { this.shapes.push({ kind: "line", closed: true, points: outline(x, y, form), width: 1.5, ...look }); }
}

function outline(x, y, form, r = 3.6) {
  if (form === "square") return [[x - r, y - r], [x + r, y - r], [x + r, y + r], [x - r, y + r]];
  if (form === "diamond") return [[x, y - r * 1.4], [x + r * 1.4, y], [x, y + r * 1.4], [x - r * 1.4, y]];
  return Array.from({ length: 16 }, (_, n) => [x + r * Math.cos((n * Math.PI) / 8), y + r * Math.sin((n * Math.PI) / 8)]);
}

function hatchLines({ x, y, w, h }, step = 6) {
  const lines = [];
  for (let at = step / 2; at < w + h; at += step) {
    lines.push([[x + Math.max(0, at - h), y + Math.min(at, h)], [x + Math.min(at, w), y + Math.max(0, at - w)]]);
  }
  return lines;
}

function draw(context, picture) {
  context.fillStyle = tone("paper");
  context.fillRect(0, 0, picture.width, picture.height);
  for (const shape of picture.shapes) {
    context.save();
    context.setLineDash(shape.dash ?? []);
    if (shape.kind === "rect") {
      if (shape.fill) { context.fillStyle = shape.fill; context.fillRect(shape.x, shape.y, shape.w, shape.h); }
      context.strokeStyle = shape.hatch ?? shape.stroke ?? "transparent";
      context.lineWidth = shape.hatch ? 0.8 : shape.width ?? 1;
      if (shape.hatch) hatchLines(shape).forEach((points) => path(context, points));
      else if (shape.stroke) context.strokeRect(shape.x, shape.y, shape.w, shape.h);
    } else if (shape.kind === "line") {
      Object.assign(context, { strokeStyle: shape.stroke ?? "transparent", lineWidth: shape.width, lineJoin: "round" });
      if (shape.closed) { context.fillStyle = shape.fill ?? "transparent"; path(context, shape.points, true); }
      else path(context, shape.points);
    } else {
      context.font = `${shape.bold ? "600 " : ""}${shape.size}px ${shape.mono ? MONO : FONT}`;
      Object.assign(context, { fillStyle: shape.fill, textAlign: shape.anchor ?? "start", textBaseline: "middle" });
      context.translate(shape.x, shape.y);
      if (shape.turn) context.rotate((shape.turn * Math.PI) / 180);
      context.fillText(shape.text, 0, 0);
    }
    context.restore();
  }
}

function path(context, points, closed = false) {
  context.beginPath();
  points.forEach(([x, y], n) => (n ? context.lineTo(x, y) : context.moveTo(x, y)));
  if (closed) { context.closePath(); context.fill(); }
  context.stroke();
}

const NOT_IN_XML = /[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]/g;
const SVG = "http" + "://www.w3.org/2000/svg"; // in two, so that no address is found in the file

function svgOf(picture) {
  const element = (tag, values, text) => {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(values)) if (value !== undefined) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text.replaceAll(NOT_IN_XML, "\ufffd");
    return made;
  };
  const round = (number) => Math.round(number * 100) / 100;
  const joined = (points) => points.map((point) => point.map(round).join(",")).join(" ");
  const root = element("svg", { viewBox: `0 0 ${picture.width} ${picture.height}`, width: picture.width, height: picture.height });
  root.append(element("rect", { width: picture.width, height: picture.height, fill: tone("paper") }));
  for (const shape of picture.shapes) {
    const dash = shape.dash?.join(" ");
    if (shape.kind === "rect") {
      const place = { x: round(shape.x), y: round(shape.y), width: round(shape.w), height: round(shape.h) };
      root.append(element("rect", { ...place, fill: shape.fill ?? "none", stroke: shape.stroke, "stroke-width": shape.width, "stroke-dasharray": dash }));
      if (shape.hatch) hatchLines(shape).forEach((points) => root.append(element("polyline", { points: joined(points), stroke: shape.hatch, "stroke-width": 0.8 })));
    } else if (shape.kind === "line") {
      root.append(element(shape.closed ? "polygon" : "polyline", { points: joined(shape.points), fill: (shape.closed && shape.fill) || "none", stroke: shape.stroke, "stroke-width": shape.width, "stroke-dasharray": dash, "stroke-linejoin": "round" }));
    } else {
      const anchor = { start: "start", center: "middle", end: "end" }[shape.anchor ?? "start"];
      root.append(element("text", {
        x: round(shape.x), y: round(shape.y), fill: shape.fill, "font-size": shape.size, "font-family": shape.mono ? MONO : FONT,
        "font-weight": shape.bold ? 600 : undefined, "text-anchor": anchor, "dominant-baseline": "central",
        transform: shape.turn ? `rotate(${shape.turn} ${round(shape.x)} ${round(shape.y)})` : undefined,
      }, shape.text));
    }
  }
  return root;
}

function saveSvg(name, picture) {
  save(name, new XMLSerializer().serializeToString(svgOf(picture)), "image/svg+xml");
}

async function savePng(name, picture) {
  const scale = Math.min(2, 16_000 / Math.max(picture.width, picture.height));
  const canvas = h("canvas", { width: Math.ceil(picture.width * scale), height: Math.ceil(picture.height * scale) });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  draw(context, picture);
  save(name, await new Promise((done) => canvas.toBlob(done, "image/png")), "image/png");
}

const measuring = h("canvas").getContext("2d");

function widthOf(text, size, { mono = false, bold = false } = {}) {
  measuring.font = `${bold ? "600 " : ""}${size}px ${mono ? MONO : FONT}`;
  return measuring.measureText(text).width;
}
