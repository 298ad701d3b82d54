"use strict";
// Adds to drawings that are whole without it: a read-out under the pointer, zoom by a range of steps,
// switches for the curves. It moves what is drawn and writes text; it makes no markup from any text.
(() => {
  const SVG = "http://www.w3.org/2000/svg";

  const made = (tag, attributes, parent) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (parent) parent.append(node);
    return node;
  };
  const button = (text, act) => {
    const node = document.createElement("button");
    node.type = "button";
    node.textContent = text;
    node.addEventListener("click", act);
    return node;
  };
  const shown = (value, digits = 5) =>
    value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)
      ? value.toExponential(3) : String(Number(value.toPrecision(digits)));

  // Places along one axis, [low, high, start, end] and, of a value axis, its base (0 is linear).
  const axis = ([low, high, start, end, base = 0]) => {
    const flat = (v) => (base ? Math.log(v) : v), back = (v) => (base ? Math.exp(v) : v);
    const a = flat(low), b = flat(high);
    return {
      start, end, base,
      place: (v) => start + ((flat(v) - a) / (b - a)) * (end - start),
      value: (p) => back(a + ((p - start) / (end - start)) * (b - a)),
    };
  };
  // First index whose step is not below `step`.
  const from = (steps, step) => {
    let low = 0, high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low;
  };
  const nearest = (steps, step) => {
    const at = from(steps, step);
    if (at === steps.length) return at - 1;
    return at > 0 && step - steps[at - 1] < steps[at] - step ? at - 1 : at;
  };

  const lines = (figure) => {
    const svg = figure.querySelector(":scope > svg");
    const found = JSON.parse(document.getElementById(figure.dataset.chart + "-data").textContent);
    const x = axis(found.x), y = axis(found.y);
    const top = Math.min(y.start, y.end), bottom = Math.max(y.start, y.end);
    const curves = svg.querySelector(".curves"), rows = svg.querySelector(".rows");
    const height = svg.viewBox.baseVal.height;
    const hidden = new Set();
    let first = found.x[0], last = found.x[1];

    const read = document.createElement("output");
    read.className = "read";
    figure.append(read);
    const guide = made("line", { class: "guide off", y1: top, y2: height - 40 }, svg);
    const chosen = made("rect", { class: "chosen off", y: top, height: height - 40 - top }, svg);

    const placed = (step) => x.start + ((step - first) / (last - first)) * (x.end - x.start);
    const stepAt = (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const inside = Math.min(Math.max(at, x.start), x.end);
      return first + ((inside - x.start) / (x.end - x.start)) * (last - first);
    };

    const redraw = () => {
      const whole = first === found.x[0] && last === found.x[1];
      const sx = (found.x[1] - found.x[0]) / (last - first);
      const dx = x.start - x.place(first) * sx;
      let low = Infinity, high = -Infinity;
      found.series.forEach((series, n) => {
        if (hidden.has(n)) return;
        for (let i = from(series.x, first); i < series.x.length && series.x[i] <= last; i += 1) {
          const at = y.place(series.y[i]);
          if (at < low) low = at;
          if (at > high) high = at;
        }
      });
      let sy = 1, dy = 0;
      if (!(whole && hidden.size === 0) && high >= low) {
        const room = Math.max((high - low) * 0.06, 2);
        low -= room; high += room;
        sy = (bottom - top) / (high - low);
        dy = top - low * sy;
      }
      curves.setAttribute("transform", `matrix(${sx} 0 0 ${sy} ${dx} ${dy})`);
      if (rows) rows.setAttribute("transform", `matrix(${sx} 0 0 1 ${dx} 0)`);
      const xs = svg.querySelector(".xticks"), ys = svg.querySelector(".yticks");
      if (!redraw.kept) redraw.kept = [[...xs.childNodes], [...ys.childNodes]];
      if (whole && hidden.size === 0) {
        xs.replaceChildren(...redraw.kept[0]);
        ys.replaceChildren(...redraw.kept[1]);
        return;
      }
      xs.replaceChildren();
      const every = Math.max(1, Math.ceil((last - first) / 7));
      for (let step = Math.ceil(first / every) * every; step <= last; step += every) {
        made("text", { x: placed(step), y: height - 23, "text-anchor": "middle" }, xs)
          .textContent = step.toLocaleString("en");
      }
      ys.replaceChildren();
      for (let n = 0; n < 5; n += 1) {
        const at = top + ((n + 0.5) / 5) * (bottom - top);
        made("line", { class: "grid", x1: x.start, x2: x.end, y1: at, y2: at }, ys);
        made("text", { x: x.start - 6, y: at + 4, "text-anchor": "end" }, ys)
          .textContent = shown(y.value((at - dy) / sy), 4);
      }
    };

    const zoom = (a, b) => {
      const low = Math.max(Math.min(a, b), found.x[0]), high = Math.min(Math.max(a, b), found.x[1]);
      if (!(high - low >= 1)) return;
      [first, last] = [low, high];
      fromBox.value = String(Math.ceil(first));
      toBox.value = String(Math.floor(last));
      redraw();
    };
    const all = () => zoom(found.x[0], found.x[1]);
    const box = (label) => {
      const holder = document.createElement("label"), input = document.createElement("input");
      input.type = "number";
      holder.append(label + " ", input);
      input.addEventListener("change", () => zoom(Number(fromBox.value) - 0.5, Number(toBox.value) + 0.5));
      bar.append(holder);
      return input;
    };
    const bar = document.createElement("div");
    bar.className = "range";
    const fromBox = box("Steps from"), toBox = box("to");
    bar.append(button("Whole range", all), "Drag over the chart to zoom.");
    figure.append(bar);

    for (const entry of figure.querySelectorAll(".entry")) {
      const n = Number(entry.dataset.s);
      const swap = button("", () => {
        if (hidden.has(n)) hidden.delete(n); else hidden.add(n);
        swap.setAttribute("aria-pressed", String(!hidden.has(n)));
        curves.querySelector(`:scope > g[data-s="${n}"]`).classList.toggle("off", hidden.has(n));
        redraw();
      });
      swap.className = "entry";
      swap.setAttribute("aria-pressed", "true");
      swap.append(...entry.childNodes);
      entry.replaceWith(swap);
    }

    let started = null;
    svg.classList.add("drag");
    svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      started = stepAt(event);
      svg.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    svg.addEventListener("pointermove", (event) => {
      const at = stepAt(event);
      if (started !== null) {
        const [a, b] = [placed(started), placed(at)].sort((p, q) => p - q);
        chosen.setAttribute("x", a);
        chosen.setAttribute("width", b - a);
        chosen.classList.toggle("off", b - a < 4);
      }
      const told = found.series
        .map((series, n) => ({ series, n, i: nearest(series.x, at) }))
        .filter(({ n, i }) => !hidden.has(n) && i >= 0);
      const marks = found.rows.map((row) => row.x[nearest(row.x, at)]).filter((s) => s !== undefined);
      const steps = told.map(({ series, i }) => series.x[i]).concat(marks);
      if (steps.length === 0) return;
      const step = steps.reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
      const parts = told.filter(({ series, i }) => series.x[i] === step)
        .map(({ series, i }) => `${series.name} ${shown(series.y[i])}`);
      for (const row of found.rows) if (row.x[nearest(row.x, step)] === step) parts.push(row.name);
      read.textContent = `Step ${step.toLocaleString("en")}: ${parts.join(" · ")}`;
      guide.setAttribute("x1", placed(step));
      guide.setAttribute("x2", placed(step));
      guide.classList.toggle("off", step < first || step > last);
    });
    const done = (event) => {
      chosen.classList.add("off");
      const begun = started;
      started = null;
      if (begun !== null && event.type === "pointerup") {
        const at = stepAt(event);
        if (Math.abs(placed(at) - placed(begun)) >= 4) zoom(begun, at);
      }
    };
    svg.addEventListener("pointerup", done);
    svg.addEventListener("pointercancel", done);
    svg.addEventListener("pointerleave", () => {
      guide.classList.add("off");
      if (started === null) read.textContent = "";
    });
    svg.addEventListener("dblclick", all);
    all();
  };

  const bars = (figure) => {
    const read = document.createElement("output");
    read.className = "read";
    figure.append(read);
    figure.addEventListener("pointerover", (event) => {
      const title = event.target.closest("rect")?.querySelector("title");
      read.textContent = title ? title.textContent : "";
    });
  };

  document.querySelectorAll("figure.lines").forEach(lines);
  document.querySelectorAll("figure.bars").forEach(bars);

  // On paper every detail is open; afterwards it is as the reader left it.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const details of closed) details.open = true;
  });
  addEventListener("afterprint", () => {
    for (const details of closed) details.open = false;
    closed = [];
  });
})();
