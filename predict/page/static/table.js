// The table of kernels: search, filters, order, pages, and the details of the chosen one.

const PAGE = 50;

function kernelTable({ k, names, total, choose, selected }) {
  const lower = k.name.map((name, i) =>
    [
      name,
      names.kind[k.kind[i]],
      names.op[k.op[i]],
      names.line[k.line[i]],
      names.module[k.module[i]],
      names.dtype[k.dtype[i]],
      names.source[k.source[i]],
    ]
      .join(" ")
      .toLowerCase(),
  );
  const word = (column) => (i) => names[column][k[column][i]];
  const columns = [
    { id: "name", text: "kernel", get: (i) => k.name[i], words: true },
    { id: "kind", text: "kind", get: word("kind"), words: true },
    { id: "busy", text: "time", get: (i) => k.busy[i], show: (i) => duration(k.busy[i]) },
    { id: "share", text: "share", get: (i) => k.busy[i], show: (i) => percent(k.busy[i] / total) },
    k.runs.some((runs) => runs !== 1) && {
      id: "runs",
      text: "runs",
      get: (i) => k.runs[i],
      show: (i) => whole(k.runs[i]),
    },
    {
      id: "interval",
      text: "interval of one",
      get: (i) => k.hi[i] / k.lo[i],
      show: (i) => `${duration(k.lo[i])} – ${duration(k.hi[i])}`,
      note: "ordered by its width",
    },
    { id: "inside", text: "domain", get: (i) => k.inside[i] },
    { id: "bound", text: "bound", get: word("bound"), words: true },
    { id: "roof", text: "of roofline", get: (i) => roofShare(k, i), show: (i) => percent(roofShare(k, i)) },
    { id: "flops", text: "FLOP", get: (i) => k.flops[i], show: (i) => count(k.flops[i]) },
    { id: "bytes", text: "bytes", get: (i) => k.bytes[i], show: (i) => size(k.bytes[i]) },
    {
      id: "module",
      text: "module",
      get: word("module"),
      show: (i) => shortLine(names.module[k.module[i]]),
      words: true,
      wide: true,
    },
    {
      id: "line",
      text: "line",
      get: word("line"),
      show: (i) => names.line[k.line[i]].split("/").pop(),
      words: true,
      wide: true,
    },
  ].filter(Boolean);
  let order = { column: columns[2], falling: true },
    page = 0,
    rows = [];
  const filters = { text: "", kind: "", domain: "" };
  const body = el("tbody", {}),
    said = el("span", { "aria-live": "polite" });
  const heads = columns.map((column) =>
    el(
      "th",
      { scope: "col", class: column.words || column.id === "inside" ? null : "n", title: column.note },
      el("button", { type: "button", "data-column": column.id, onclick: () => sortBy(column) }, column.text),
    ),
  );

  function sortBy(column) {
    const falling = order.column === column ? !order.falling : !column.words;
    order = { column, falling };
    page = 0;
    find();
  }
  function find() {
    const words = filters.text.toLowerCase().split(/\s+/).filter(Boolean);
    rows = [];
    for (let i = 0; i < lower.length; i++) {
      if (filters.kind && names.kind[k.kind[i]] !== filters.kind) continue;
      if (filters.domain && String(k.inside[i]) !== filters.domain) continue;
      if (words.every((w) => lower[i].includes(w))) rows.push(i);
    }
    const { get, words: text } = order.column,
      sign = order.falling ? -1 : 1;
    rows.sort(
      (a, b) =>
        sign * (text ? get(a).localeCompare(get(b), "en", { numeric: true }) : get(a) - get(b)) || a - b,
    );
    draw();
  }
  function draw() {
    const last = Math.max(0, Math.ceil(rows.length / PAGE) - 1);
    page = clamp(page, 0, last);
    body.replaceChildren(...rows.slice(page * PAGE, (page + 1) * PAGE).map(tableRow));
    if (!rows.length)
      body.append(el("tr", {}, el("td", { colspan: columns.length, class: "soft" }, "No kernel matches.")));
    heads.forEach((head, i) => {
      if (columns[i] === order.column)
        head.setAttribute("aria-sort", order.falling ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const shown = sum(rows.map((i) => k.busy[i]));
    const first = page * PAGE + 1,
      end = Math.min(rows.length, first + PAGE - 1);
    said.textContent = rows.length
      ? `${whole(first)}–${whole(end)} of ${whole(rows.length)} kernels, ${percent(shown / total)} of the time`
      : "";
    back.disabled = page === 0;
    next.disabled = page >= last;
  }
  function tableRow(i) {
    return el(
      "tr",
      { "aria-selected": String(selected() === i), "data-row": i, onclick: () => choose(i) },
      columns.map((column) => {
        if (column.id === "name") {
          return el(
            "td",
            { class: "text name" },
            el("button", { type: "button", title: k.name[i] }, k.name[i]),
          );
        }
        if (column.id === "kind") {
          const kind = column.get(i);
          return el("td", {}, el("i", { class: "key", style: { background: variable(kind) } }), kind);
        }
        if (column.id === "inside") return el("td", {}, domainFlag(k, i));
        const text = column.show ? column.show(i) : column.get(i);
        return el(
          "td",
          {
            class: column.words ? (column.wide ? "text" : null) : "n",
            title: column.wide ? column.get(i) : null,
          },
          text,
        );
      }),
    );
  }
  const back = el(
    "button",
    {
      type: "button",
      onclick: () => {
        page--;
        draw();
      },
    },
    "Previous",
  );
  const next = el(
    "button",
    {
      type: "button",
      onclick: () => {
        page++;
        draw();
      },
    },
    "Next",
  );
  const search = el("input", {
    type: "search",
    placeholder: "Search name, op, module, line …",
    "aria-label": "Search kernels",
    oninput: () => {
      filters.text = search.value;
      page = 0;
      find();
    },
  });
  const kinds = picker("Kind", [["", "All kinds"], ...names.kind.map((kind) => [kind, kind])], (v) => {
    filters.kind = v;
    page = 0;
    find();
  });
  const domains = picker(
    "Domain",
    [
      ["", "In and out of domain"],
      ["1", "In domain"],
      ["0", "Out of domain"],
    ],
    (v) => {
      filters.domain = v;
      page = 0;
      find();
    },
  );
  const save = el(
    "button",
    { type: "button", onclick: () => download("kernels.csv", csv(k, names)) },
    "Save as CSV",
  );
  find();
  return {
    tools: [search, kinds, domains, save],
    draw,
    body: [
      el(
        "div",
        {
          class: "scroll",
          style: { "max-height": "none" },
          tabindex: "0",
          role: "region",
          "aria-label": "Table of kernels",
        },
        el(
          "table",
          { class: "kernels" },
          el("caption", { class: "sr" }, "Kernels"),
          el("thead", {}, el("tr", {}, heads)),
          body,
        ),
      ),
      el("div", { class: "pager" }, said, back, next),
    ],
    show(i) {
      const at = rows.indexOf(i);
      if (at >= 0) page = Math.floor(at / PAGE);
      draw();
    },
  };
}

const roofShare = (k, i) => (k.one[i] > 0 ? Math.max(k.compute[i], k.memory[i]) / k.one[i] : 0);

function domainFlag(k, i) {
  return k.inside[i] ? el("span", { class: "flag" }, "in") : el("span", { class: "flag out" }, "outside");
}

function csv(k, names) {
  const columns = Object.keys(k).filter((name) => Array.isArray(k[name]) && name !== "collective");
  const quote = (value) => {
    // A leading sign would make a spreadsheet take a name for a formula.
    const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value ?? "");
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const unit = {
    one: "latency_us",
    lo: "lo_us",
    hi: "hi_us",
    busy: "total_us",
    compute: "roof_compute_us",
    memory: "roof_memory_us",
    start: "start_us",
    end: "end_us",
  };
  const lines = [columns.map((name) => unit[name] || name).join(",")];
  for (let i = 0; i < k.name.length; i++) {
    lines.push(columns.map((name) => quote(names[name] ? names[name][k[name][i]] : k[name][i])).join(","));
  }
  return lines.join("\n") + "\n";
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// What is known of one kernel: figures, origin, why this time, what it was compared with.
function kernelDetails({ k, names, total, device, explained, close }, i) {
  const word = (column) => names[column][k[column][i]];
  const found = explained.get(i);
  const facts = [
    ["time", `${duration(k.busy[i])}, ${percent(k.busy[i] / total)} of the program`],
    [
      "one execution",
      `${duration(k.one[i])} (90 % interval ${duration(k.lo[i])} – ${duration(k.hi[i])}), ${whole(k.runs[i])} ${k.runs[i] === 1 ? "run" : "runs"}`,
    ],
    [
      "bound",
      `${word("bound")}; ${percent(roofShare(k, i))} of the roofline (compute ${duration(k.compute[i])}, memory ${duration(k.memory[i])})`,
    ],
    ["work", `${count(k.flops[i])} FLOP, ${size(k.bytes[i])}, ${word("dtype")}, ${word("opcode")}`],
    [
      "achieved",
      `${rate((k.flops[i] / k.one[i]) * 1e6, "FLOP/s")}, ${rate((k.bytes[i] / k.one[i]) * 1e6, "B/s")}`,
    ],
    ["from", [word("op"), word("line")].filter(Boolean).join("  ·  ") || "not known"],
    [
      "module",
      [word("module").replaceAll("/", " › "), word("phase")].filter(Boolean).join("  ·  ") ||
        "outside of modules",
    ],
    [
      "estimate",
      `${word("source")}, ${k.inside[i] ? "in the training domain" : "outside of the training domain"}`,
    ],
  ];
  return el(
    "div",
    { class: "details", id: "details", tabindex: "-1", role: "region", "aria-label": `Kernel ${k.name[i]}` },
    el(
      "div",
      { class: "title" },
      el("h3", {}, el("i", { class: "key", style: { background: variable(word("kind")) } }), k.name[i]),
      el("button", { type: "button", onclick: close }, "Close"),
    ),
    el(
      "div",
      { class: "two" },
      definitions(facts),
      found
        ? explanation(found, device)
        : el(
            "p",
            { class: "soft small" },
            "The reasons of the costliest kernels are in this page; for this one: opcast explain --kernel NAME.",
          ),
    ),
    found
      ? el(
          "details",
          {},
          el("summary", { class: "small" }, "HLO of the kernel"),
          el("pre", {}, found.text + (found.cut ? `\n… ${whole(found.cut)} more characters` : "")),
        )
      : null,
  );
}

function definitions(pairs) {
  return el(
    "dl",
    {},
    pairs.map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]),
  );
}

function explanation(found) {
  const pairs = [
    [
      "alone",
      `${duration(found.alone)} = (roofline ${duration(found.roofline)} + floor ${duration(found.floor)}) × ${significant(found.factor)}`,
    ],
  ];
  if (found.parts.length) {
    pairs.push([
      "learned factor",
      found.parts.map(([group, ratio]) => `${group} × ${significant(Math.exp(ratio))}`).join(", "),
    ]);
  }
  if (found.score.length === 2)
    pairs.push(["domain score", `${percent(found.score[0])}, at least ${percent(found.score[1])} is inside`]);
  for (const [feature, value, low, high] of found.outside)
    pairs.push([
      "unusual",
      `${feature} ${significant(value)}, trained from ${significant(low)} to ${significant(high)}`,
    ]);
  for (const note of found.notes) pairs.push(["note", note]);
  if (!found.near.length)
    pairs.push(["compared with", "this model keeps no measured kernels to compare with"]);
  return el(
    "div",
    {},
    definitions(pairs),
    found.near.length
      ? el(
          "div",
          { class: "sub" },
          el("h3", {}, "Nearest measured kernels"),
          el(
            "table",
            {},
            el(
              "thead",
              {},
              el(
                "tr",
                {},
                el("th", {}, "from"),
                el("th", {}, "device"),
                el("th", { class: "n" }, "measured"),
                el("th", { class: "n" }, "predicted"),
                el("th", { class: "n" }, "distance"),
              ),
            ),
            el(
              "tbody",
              {},
              found.near.map(([label, device, measured, predicted, distance]) =>
                el(
                  "tr",
                  {},
                  el("td", {}, label),
                  el("td", {}, device),
                  el("td", { class: "n" }, duration(measured)),
                  el("td", { class: "n" }, duration(predicted)),
                  el("td", { class: "n" }, significant(distance)),
                ),
              ),
            ),
          ),
        )
      : null,
  );
}
