"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const make = (name, attributes = {}, text) => {
    const svg = ["svg", "g", "path", "line", "text", "rect", "circle"].includes(name);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const colour = (run) => `var(--c${run % 8})`;
  const short = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  };
  const WIDTH = 420, HEIGHT = 210, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 24;
  const state = { smooth: 0, x: "step", log: false, hidden: new Set() };

  // An exponential moving average that starts without bias; weight 0 changes nothing.
  const smoothed = (values, weight) => {
    let sum = 0, norm = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = sum * weight + (1 - weight) * value;
      norm = norm * weight + (1 - weight);
      return sum / norm;
    });
  };
  // Seconds trained at a step, between the rows of the run's clock.
  const clock = (run, step) => {
    const { x, y } = data.clocks[run];
    if (!x.length) return null;
    let low = 0, high = x.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (x[middle] <= step) low = middle; else high = middle; }
    if (x[high] === x[low]) return y[low];
    const share = Math.min(1, Math.max(0, (step - x[low]) / (x[high] - x[low])));
    return y[low] + share * (y[high] - y[low]);
  };
  const place = (run, step) => (state.x === "step" ? step : clock(run, step) / 60);
  const nearest = (points, x) => {
    let best = null;
    for (const point of points) if (point[1] !== null && (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x))) best = point;
    return best;
  };
  const ticks = (low, high) => {
    const raw = (high - low) / 4 || 1, base = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * base).find((s) => s >= raw);
    const found = [];
    for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) found.push(tick);
    return found;
  };

  const drawers = [];
  const chart = (spec) => {
    const figure = make("figure"), caption = make("figcaption", {}, spec.title);
    const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0" });
    const reading = make("div", { class: "reading", "aria-live": "polite" });
    figure.append(caption, svg, reading);
    let scale = null, curves = [], cursor = null;
    const draw = () => {
      curves = [];
      spec.curves.forEach((curve, run) => {
        if (!curve || state.hidden.has(run)) return;
        const usable = (value) => (value === null || (state.log && value <= 0) ? null : value);
        const xs = curve.x.map((step) => place(run, step)), raw = curve.y.map(usable);
        const soft = smoothed(raw, state.smooth);
        curves.push({ run, points: xs.map((x, i) => [x, soft[i]]), raw: xs.map((x, i) => [x, raw[i]]) });
      });
      svg.replaceChildren();
      const all = curves.flatMap((c) => (state.smooth ? [...c.points, ...c.raw] : c.points)).filter((p) => p[0] !== null && p[1] !== null);
      const label = curves.map((c) => { const last = c.points.filter((p) => p[1] !== null).at(-1); return `${data.runs[c.run]} ends at ${short(last ? last[1] : null)}`; });
      svg.setAttribute("aria-label", `${spec.title} by ${state.x}. ${label.join(". ")}. Arrow keys read values.`);
      scale = null;
      reading.textContent = "";
      if (!all.length) { svg.append(make("text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing to show")); return; }
      const flat = (v) => (state.log ? Math.log10(v) : v);
      let [x0, x1] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
      let [y0, y1] = [Math.min(...all.map((p) => flat(p[1]))), Math.max(...all.map((p) => flat(p[1])))];
      if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
      if (y1 - y0 <= 1e-9 * Math.max(Math.abs(y0), Math.abs(y1))) { const margin = Math.abs(y0) * 0.1 || 0.5; y0 -= margin; y1 += margin; }
      const room = (y1 - y0) * 0.05; y0 -= room; y1 += room;
      scale = {
        x: (v) => LEFT + (v - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT),
        y: (v) => TOP + (y1 - flat(v)) / (y1 - y0) * (HEIGHT - TOP - BOTTOM),
        back: (pixel) => x0 + (pixel - LEFT) / (WIDTH - LEFT - RIGHT) * (x1 - x0), x0, x1,
      };
      for (const tick of ticks(y0, y1)) {
        const y = TOP + (y1 - tick) / (y1 - y0) * (HEIGHT - TOP - BOTTOM);
        svg.append(make("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
        svg.append(make("text", { x: LEFT - 5, y: y + 4, "text-anchor": "end" }, short(state.log ? 10 ** tick : tick)));
      }
      for (const tick of ticks(x0, x1)) svg.append(make("text", { x: scale.x(tick), y: HEIGHT - 7, "text-anchor": scale.x(tick) > WIDTH - 30 ? "end" : "middle" }, short(tick)));
      const path = (points) => {
        let text = "", pen = false;
        for (const [x, y] of points) {
          if (y === null || x === null) { pen = false; continue; }
          text += `${pen ? "L" : "M"}${scale.x(x).toFixed(1)} ${scale.y(y).toFixed(1)}`;
          pen = true;
        }
        return text;
      };
      for (const curve of curves) {
        if (state.smooth) svg.append(make("path", { class: "raw", d: path(curve.raw), style: `stroke:${colour(curve.run)}` }));
        svg.append(make("path", { class: "curve", d: path(curve.points), style: `stroke:${colour(curve.run)}` }));
        if (curve.points.length === 1) svg.append(make("circle", { cx: scale.x(curve.points[0][0]), cy: scale.y(curve.points[0][1]), r: 3, style: `fill:${colour(curve.run)}` }));
      }
      cursor = make("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
      svg.append(cursor);
    };
    let at = null;
    const read = (x) => {
      if (!scale) return;
      at = Math.min(scale.x1, Math.max(scale.x0, x));
      const found = curves.map((c) => [c.run, nearest(c.points, at)]).filter(([, point]) => point);
      if (!found.length) return;
      at = found[0][1][0];
      for (const side of ["x1", "x2"]) cursor.setAttribute(side, scale.x(at));
      cursor.setAttribute("visibility", "visible");
      const unit = state.x === "step" ? "step" : "minute";
      reading.textContent = `${unit} ${short(at)}: ` + found.map(([run, point]) => (data.runs.length > 1 ? `${data.runs[run]} ` : "") + short(point[1])).join(", ");
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      if (scale) read(scale.back((event.clientX - box.left) / box.width * WIDTH));
    });
    svg.addEventListener("keydown", (event) => {
      if (!scale || !curves.length) return;
      const xs = curves[0].points.filter((p) => p[1] !== null).map((p) => p[0]);
      const index = at === null ? -1 : xs.reduce((best, x, i) => (Math.abs(x - at) < Math.abs(xs[best] - at) ? i : best), 0);
      const jump = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: xs.length - 1 }[event.key];
      if (jump === undefined) return;
      event.preventDefault();
      read(xs[Math.min(xs.length - 1, Math.max(0, jump))]);
    });
    drawers.push(draw);
    return figure;
  };
  const redraw = () => drawers.forEach((draw) => draw());

  const controls = document.getElementById("controls");
  controls.addEventListener("submit", (event) => event.preventDefault());
  const labelled = (text, node) => { const label = make("label"); label.append(text, node); controls.append(label); return node; };
  const smooth = labelled("Smoothing", make("input", { type: "range", id: "smooth", min: "0", max: "0.99", step: "0.01", value: "0" }));
  smooth.addEventListener("input", () => { state.smooth = Number(smooth.value); redraw(); });
  if (data.clocks.some((c) => c.x.length > 1)) {
    const axis = labelled("Across", make("select", { id: "axis" }));
    axis.append(make("option", { value: "step" }, "steps"), make("option", { value: "time" }, "minutes trained"));
    axis.addEventListener("change", () => { state.x = axis.value; redraw(); });
  }
  const log = labelled("Logarithmic", make("input", { type: "checkbox", id: "log" }));
  log.addEventListener("change", () => { state.log = log.checked; redraw(); });
  if (data.runs.length > 1) data.runs.forEach((name, run) => {
    const box = make("input", { type: "checkbox", checked: "" });
    box.addEventListener("change", () => { if (box.checked) state.hidden.delete(run); else state.hidden.add(run); redraw(); });
    const label = make("label"), swatch = make("span", { class: "swatch", style: `background:${colour(run)}` });
    label.append(box, swatch, name);
    controls.append(label);
  });
  const charts = document.getElementById("charts");
  for (const spec of data.charts) charts.append(chart(spec));
  redraw();

  const histogram = () => {
    const spec = data.histogram, holder = document.getElementById("histogram");
    if (!spec || !holder) return;
    const figure = make("figure"), svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    const bins = spec.counts[0].length, most = Math.max(...spec.counts.flat());
    svg.setAttribute("aria-label", `Step times: most steps take about ${short(1000 * (spec.low + spec.width * (0.5 + spec.counts[0].indexOf(Math.max(...spec.counts[0])))))} ms`);
    const inner = WIDTH - LEFT - RIGHT, tall = HEIGHT - TOP - BOTTOM;
    spec.counts.forEach((counts, run) => counts.forEach((count, bin) => {
      const high = most ? count / most * tall : 0, wide = inner / bins / spec.counts.length;
      svg.append(make("rect", { x: LEFT + bin * inner / bins + run * wide, y: TOP + tall - high, width: Math.max(1, wide - 1), height: high, style: `fill:${colour(run)}` }));
    }));
    for (let bin = 0; bin < bins; bin += 6) svg.append(make("text", { x: LEFT + bin * inner / bins, y: HEIGHT - 7, "text-anchor": "middle" }, (bin === bins - 1 ? "≥ " : "") + short(1000 * (spec.low + bin * spec.width))));
    svg.append(make("text", { x: LEFT - 5, y: TOP + 8, "text-anchor": "end" }, short(most)));
    figure.append(make("figcaption", {}, "Steps by their time in ms (means between rows)"), svg);
    holder.append(figure);
  };
  histogram();

  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
})();
