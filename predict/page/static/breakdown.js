// Where time goes: one bar of parts, tables of bars, and the tree of the user's modules.

// One bar of parts [name, value, colour]; screen readers get the table below it.
function stackedBar(parts) {
  const total = sum(parts.map((p) => p[1])) || 1;
  return el(
    "div",
    { class: "stack", "aria-hidden": "true" },
    parts.map(([name, value, shade]) =>
      el("i", {
        style: { flex: `${value / total} 1 0`, background: variable(shade) },
        onpointermove: (e) =>
          showTip(e.clientX, e.clientY, [name, `${duration(value)}, ${percent(value / total)}`]),
        onpointerleave: hideTip,
      }),
    ),
  );
}

// Parts as a table with a bar each.
function barTable(caption, parts, total, first = "part") {
  const most = Math.max(...parts.map((p) => p[1]), 1e-12);
  return el(
    "table",
    { class: "bars" },
    el("caption", { class: "sr" }, caption),
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        el("th", { scope: "col" }, first),
        el("th", {}),
        el("th", { class: "n", scope: "col" }, "time"),
        el("th", { class: "n", scope: "col" }, "share"),
      ),
    ),
    el(
      "tbody",
      {},
      parts.map(([name, value, shade]) =>
        el(
          "tr",
          {},
          el("td", { class: "name" }, keyed(shade, name)),
          barCell(value / most, shade || "accent"),
          el("td", { class: "n" }, duration(value)),
          el("td", { class: "n" }, percent(value / total)),
        ),
      ),
    ),
  );
}

// A name behind the colour that stands for it.
function keyed(shade, name) {
  return el(
    "span",
    { class: "keyed" },
    shade && shade !== "accent" && el("i", { class: "key", style: { background: variable(shade) } }),
    el("span", {}, name),
  );
}

function barCell(share, shade) {
  return el(
    "td",
    { class: "bar", "aria-hidden": "true" },
    el("div", { style: { width: `${share * 100}%`, background: variable(shade) } }),
  );
}

// A bar with the legend below: for few parts that need no table.
function barWithLegend(title, parts) {
  const total = sum(parts.map((p) => p[1])) || 1;
  return el(
    "div",
    { class: "sub" },
    el("h3", {}, title),
    stackedBar(parts),
    el(
      "div",
      { class: "legend" },
      parts.map(([name, value, shade]) =>
        el(
          "span",
          {},
          el("i", { class: "key", style: { background: variable(shade) } }),
          `${name} ${percent(value / total)}`,
        ),
      ),
    ),
  );
}

// Tree of paths such as Llama/Block_0/attention. Layers that only differ in their number can be one.
function moduleTree(paths, times, merged) {
  const root = { name: "", time: 0, children: new Map() };
  paths.forEach((path, i) => {
    let node = root;
    node.time += times[i];
    for (const part of path ? path.split("/") : []) {
      const name = merged ? part.replace(/\d+$/, "*") : part;
      if (!node.children.has(name)) node.children.set(name, { name, time: 0, children: new Map() });
      node = node.children.get(name);
      node.time += times[i];
    }
  });
  return root;
}

function moduleTable(paths, times, total) {
  const body = el("tbody", {});
  const open = new Set();
  let merged = true;
  const inside = (node) => [...node.children.values()].sort((a, b) => b.time - a.time);
  const own = (node) => node.time - sum(inside(node).map((c) => c.time));
  function row(node, path, depth) {
    const key = path.join("/"),
      children = inside(node),
      rest = own(node);
    const isOpen = children.length > 0 && open.has(key);
    const rows = [
      el(
        "tr",
        {},
        el(
          "td",
          { class: "name" },
          el(
            "span",
            { class: "keyed", style: { "padding-left": `${depth * 0.95}rem` } },
            children.length
              ? el(
                  "button",
                  {
                    type: "button",
                    class: "twist",
                    "aria-expanded": String(isOpen),
                    "aria-label": `${node.name}: parts`,
                    onclick: () => {
                      if (isOpen) open.delete(key);
                      else open.add(key);
                      draw(key);
                    },
                    "data-key": key,
                  },
                  isOpen ? "▼" : "▶",
                )
              : el("span", { class: "leaf" }),
            el("span", {}, node.name),
          ),
        ),
        barCell(node.time / total, "accent"),
        el("td", { class: "n" }, duration(node.time)),
        el("td", { class: "n" }, percent(node.time / total)),
      ),
    ];
    if (isOpen) {
      for (const child of children) rows.push(...row(child, [...path, child.name], depth + 1));
      if (rest > 0.0005 * total)
        rows.push(
          ...row({ name: "(itself)", time: rest, children: new Map() }, [...path, "(itself)"], depth + 1),
        );
    }
    return rows;
  }
  function draw(focus) {
    const tree = moduleTree(paths, times, merged);
    const tops = inside(tree),
      rest = own(tree);
    if (rest > 0) tops.push({ name: "outside of modules", time: rest, children: new Map() });
    body.replaceChildren(
      ...tops.sort((a, b) => b.time - a.time).flatMap((node) => row(node, [node.name], 0)),
    );
    if (focus) [...body.querySelectorAll("button")].find((b) => b.dataset.key === focus)?.focus();
  }
  // Opens what takes a large part of the time, level by level.
  function openTop() {
    open.clear();
    const visit = (node, path, depth) => {
      for (const child of inside(node)) {
        if (child.time < 0.2 * total || depth > 3) continue;
        open.add([...path, child.name].join("/"));
        visit(child, [...path, child.name], depth + 1);
      }
    };
    visit(moduleTree(paths, times, merged), [], 0);
    draw();
  }
  openTop();
  const numbered = paths.some((path) => /\d+(\/|$)/.test(path));
  const tools = numbered
    ? choice(
        "Layers",
        [
          ["merged", "Layers as one"],
          ["single", "Each layer"],
        ],
        "merged",
        (chosen) => {
          merged = chosen === "merged";
          openTop();
        },
      )
    : null;
  return [
    tools,
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { class: "bars tree" },
        el("caption", { class: "sr" }, "Time by module"),
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", { scope: "col" }, "module"),
            el("th", {}),
            el("th", { class: "n", scope: "col" }, "time"),
            el("th", { class: "n", scope: "col" }, "share"),
          ),
        ),
        body,
      ),
    ),
  ];
}

// Last parts of a path, the whole of it as a title.
function shortLine(text) {
  const parts = text.split("/");
  return parts.slice(-2).join("/");
}
