// The interactive figure of the paged-KV page: a block pool, three requests, and the index tensors that connect them.
// Plain JavaScript and SVG. The page works without it: the static picture stays where it is.
(function () {
  "use strict";

  const NUM_SLOTS = 32; // in the whole pool, whatever the block size
  const MAX_TOKENS = 12; // per request; three times this is more than the pool holds, on purpose
  const NAMES = ["A", "B", "C"];
  const SVG = "http://www.w3.org/2000/svg";

  // ---- the cache: the same bookkeeping as PagedKVCache in the steps, without the numbers in the slots ----

  class Pool {
    constructor(blockSize) {
      this.blockSize = blockSize;
      this.numBlocks = NUM_SLOTS / blockSize;
      this.slots = Array.from({ length: NUM_SLOTS }, () => null); // flat slot id -> {name, pos, stale}
      this.freeBlocks = Array.from({ length: this.numBlocks }, (_, block) => block);
      this.tables = { A: [], B: [], C: [] };
      this.lens = { A: 0, B: 0, C: 0 };
    }

    // Makes room for numTokens tokens of this request in all. Returns the blocks taken, or null if too few are free.
    // As in the steps, blocks are taken from the end of the free list.
    reserve(name, numTokens) {
      const missing = Math.ceil(numTokens / this.blockSize) - this.tables[name].length;
      if (missing > this.freeBlocks.length) return null;
      const taken = Array.from({ length: Math.max(missing, 0) }, () => this.freeBlocks.pop());
      this.tables[name].push(...taken);
      return taken;
    }

    place(name, pos) {
      return { block: this.tables[name][Math.floor(pos / this.blockSize)], slot: pos % this.blockSize };
    }

    flat(name, pos) {
      const { block, slot } = this.place(name, pos);
      return block * this.blockSize + slot;
    }

    write(name, pos) {
      this.slots[this.flat(name, pos)] = { name, pos, stale: false };
      this.lens[name] = pos + 1;
    }

    // The blocks go back to the free list. What lies in their slots stays there until somebody writes over it.
    free(name) {
      const blocks = this.tables[name];
      for (const block of blocks) {
        for (let i = 0; i < this.blockSize; i++) {
          const cell = this.slots[block * this.blockSize + i];
          if (cell) cell.stale = true;
        }
      }
      this.freeBlocks.push(...blocks);
      this.tables[name] = [];
      this.lens[name] = 0;
      return blocks;
    }

    owner(block) {
      return NAMES.find((name) => this.tables[name].includes(block)) || null;
    }
  }

  // Do other blocks lie between those of the table?
  function scattered(table) {
    return table.length > 0 && Math.max(...table) - Math.min(...table) >= table.length;
  }

  // ---- drawing helpers ----

  function svg(tag, attributes, text) {
    const node = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function html(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  function row(values) {
    return "[" + values.map((value) => String(value).padStart(2)).join(" ") + "]";
  }

  function matrix(rows, indent) {
    return "[" + rows.map(row).join("\n" + " ".repeat(indent + 1)) + "]";
  }

  function tokens(count) {
    return count === 1 ? "1 token" : count + " tokens";
  }

  function blocks(list) {
    return (list.length === 1 ? "block " : "blocks ") + list.join(", ");
  }

  // ---- the figure ----

  function start(root) {
    let pool;
    let selected = "A";
    let lengths = { A: 5, B: 3, C: 6 }; // what the reader asked for
    let touched = new Set(); // flat slot ids of the last action
    let dense = null; // {names, width, done: Set of "row,column"} while something is gathered
    let calls = 0;

    // -- controls: native elements, so that keyboard and screen reader work by themselves
    const controls = html("div", { class: "pk-controls" });
    const blockSize = html("select", { id: "pk-block-size" });
    for (const size of [2, 4, 8]) blockSize.append(html("option", { value: size }, String(size)));
    controls.append(html("label", { class: "pk-field" }, "Block size ", blockSize));

    const requests = html("fieldset", { class: "pk-requests" }, html("legend", {}, "Request, and its length in tokens"));
    const radios = {};
    const lengthInputs = {};
    for (const name of NAMES) {
      radios[name] = html("input", { type: "radio", name: "pk-request", id: "pk-request-" + name, value: name });
      lengthInputs[name] = html("input", {
        type: "number", min: 1, max: MAX_TOKENS, id: "pk-length-" + name, "aria-label": "Length of request " + name,
      });
      requests.append(
        html("span", { class: "pk-request" },
          html("label", { class: "pk-chip pk-" + name }, radios[name], " " + name), lengthInputs[name]),
      );
    }
    controls.append(requests);

    const buttons = {};
    const groups = [
      ["Blocks", [["allocate", "Allocate"], ["free", "Free"]]],
      ["Write", [["write-one", "Write one token"], ["write-all", "Write all at once"]]],
      ["Gather A, B, C", [["gather-one", "Gather one token"], ["gather-all", "Gather all at once"]]],
      ["Scene", [["fragment", "Fragment the pool"], ["reset", "Reset"]]],
    ];
    for (const [label, entries] of groups) {
      const group = html("div", { class: "pk-group", role: "group", "aria-label": label });
      for (const [id, text] of entries) {
        buttons[id] = html("button", { type: "button", id: "pk-" + id }, text);
        group.append(buttons[id]);
      }
      controls.append(group);
    }

    const status = html("p", { class: "pk-status", id: "pk-status", role: "status", "aria-live": "polite" });
    const tables = html("div", { class: "pk-tables", id: "pk-tables" });
    const picture = svg("svg", { class: "pk-svg", id: "pk-svg", role: "img", "aria-labelledby": "pk-svg-title" });
    const index = html("pre", { class: "pk-index", id: "pk-index", tabindex: 0, "aria-label": "Index tensors of the last action" });
    const live = html("div", { class: "pk-live" }, controls, status, tables, picture, index);

    // -- drawing

    function drawTables() {
      tables.replaceChildren();
      for (const name of NAMES) {
        const table = pool.tables[name];
        const held = table.length * pool.blockSize;
        const parts = [html("b", {}, name), ` block_table = [${table.join(", ")}]  seq_len = ${pool.lens[name]}`];
        const notes = [];
        if (held > pool.lens[name]) notes.push(`${held - pool.lens[name]} reserved, empty`);
        if (scattered(table)) notes.push("scattered");
        if (notes.length) parts.push(html("i", {}, " (" + notes.join("; ") + ")"));
        tables.append(html("code", { class: "pk-table pk-" + name, id: "pk-table-" + name }, ...parts));
      }
      tables.append(html("code", { class: "pk-table", id: "pk-free-list" }, html("b", {}, "free"), ` [${pool.freeBlocks.join(", ")}]`));
      tables.append(html("code", { class: "pk-table", id: "pk-calls" }, html("b", {}, "copy calls so far"), ` ${calls}`));
    }

    function cell(group, x, y, size, content, classes, data) {
      const box = svg("rect", { x, y, width: size - 2, height: size - 2, rx: 3, class: "pk-cell " + classes, ...data });
      group.append(box);
      if (content) {
        group.append(svg("text", { x: x + size / 2 - 1, y: y + size / 2 + 3, class: "pk-cell-text " + classes }, content));
      }
    }

    function drawPicture() {
      const width = Math.max(280, Math.floor(root.clientWidth || 640));
      const size = 32;
      const labelWidth = 26;
      const blockWidth = labelWidth + pool.blockSize * size + 14;
      const columns = Math.max(1, Math.min(4, Math.floor((width + 14) / blockWidth)));
      picture.replaceChildren(svg("title", { id: "pk-svg-title" }, describe()));
      let y = 16;
      picture.append(svg("text", { x: 0, y: 11, class: "pk-heading" }, `Pool: ${pool.numBlocks} blocks of ${pool.blockSize} slots`));
      for (let block = 0; block < pool.numBlocks; block++) {
        const x = (block % columns) * blockWidth;
        const top = y + 8 + Math.floor(block / columns) * (size + 8);
        const owner = pool.owner(block);
        const group = svg("g", { "data-block": block, "data-owner": owner || "" });
        group.append(svg("text", { x: x + labelWidth - 8, y: top + size / 2 + 3, class: "pk-label" }, block));
        if (owner) {
          group.append(svg("rect", {
            x: x + labelWidth - 4, y: top - 3, width: pool.blockSize * size + 4, height: size + 4, rx: 5, class: "pk-owned pk-" + owner,
          }));
        }
        for (let slot = 0; slot < pool.blockSize; slot++) {
          const id = block * pool.blockSize + slot;
          const content = pool.slots[id];
          const classes = [];
          if (content && !content.stale) classes.push("pk-" + content.name);
          if (content && content.stale) classes.push("pk-stale");
          if (touched.has(id)) classes.push("pk-touched");
          cell(group, x + labelWidth + slot * size - 1, top, size, content ? content.name + content.pos : "", classes.join(" "), {
            "data-slot": id, "data-content": content ? content.name + content.pos + (content.stale ? " stale" : "") : "",
          });
        }
        picture.append(group);
      }
      y += 8 + Math.ceil(pool.numBlocks / columns) * (size + 8) + 22;
      if (dense) {
        const dw = Math.min(30, Math.floor((width - labelWidth) / dense.width));
        picture.append(svg("text", { x: 0, y: y - 6, class: "pk-heading" }, `Gathered: [${dense.names.length}, ${dense.width}], left-padded`));
        dense.names.forEach((name, r) => {
          const group = svg("g", { "data-row": name });
          const top = y + 2 + r * (dw + 2);
          group.append(svg("text", { x: labelWidth - 8, y: top + dw / 2 + 3, class: "pk-label" }, name));
          for (let c = 0; c < dense.width; c++) {
            const pos = c - (dense.width - dense.lens[name]);
            const done = dense.done.has(r + "," + c);
            const text = pos < 0 ? "0" : done ? name + pos : "";
            cell(group, labelWidth + c * dw - 1, top, dw, text, pos < 0 ? "pk-pad" : done ? "pk-" + name : "",
              { "data-column": c, "data-content": text });
          }
          picture.append(group);
        });
        y += 2 + dense.names.length * (dw + 2) + 8;
      }
      picture.setAttribute("viewBox", `0 0 ${width} ${y}`);
      picture.setAttribute("width", width);
      picture.setAttribute("height", y);
    }

    function describe() {
      const parts = NAMES.map((name) => {
        const table = pool.tables[name];
        return table.length ? `${name} holds ${tokens(pool.lens[name])} in ${blocks(table)}` : `${name} holds nothing`;
      });
      return `Block pool. ${parts.join("; ")}; ${pool.freeBlocks.length} blocks free.`;
    }

    // The data table under the figure says in words what the picture shows.
    function drawData() {
      const body = root.querySelector(".pk-data tbody");
      body.replaceChildren();
      for (let block = 0; block < pool.numBlocks; block++) {
        const cells = [];
        for (let slot = 0; slot < pool.blockSize; slot++) {
          const content = pool.slots[block * pool.blockSize + slot];
          cells.push(content ? content.name + content.pos + (content.stale ? " (old)" : "") : "empty");
        }
        body.append(html("tr", {}, html("td", {}, String(block)), html("td", {}, pool.owner(block) || "free"), html("td", {}, cells.join(", "))));
      }
    }

    function draw(message, code) {
      if (message !== undefined) status.textContent = message;
      if (code !== undefined) index.textContent = code;
      for (const name of NAMES) {
        radios[name].checked = name === selected;
        lengthInputs[name].value = lengths[name];
      }
      blockSize.value = pool.blockSize;
      buttons.allocate.textContent = "Allocate " + selected;
      buttons.free.textContent = "Free " + selected;
      drawTables();
      drawPicture();
      drawData();
    }

    // -- actions

    function outOfBlocks(name, wanted) {
      const needed = Math.ceil(wanted / pool.blockSize) - pool.tables[name].length;
      touched = new Set();
      draw(`OutOfBlocks: request ${name} needs ${needed} more, ${pool.freeBlocks.length} free. Free a request or make ${name} shorter.`, "");
    }

    function took(taken) {
      return taken.length ? ` Took ${blocks(taken)} from the free list.` : "";
    }

    function allocate() {
      dense = null;
      const taken = pool.reserve(selected, lengths[selected]);
      if (taken === null) return outOfBlocks(selected, lengths[selected]);
      touched = new Set(taken.flatMap((block) => Array.from({ length: pool.blockSize }, (_, i) => block * pool.blockSize + i)));
      const table = pool.tables[selected];
      draw(
        taken.length ? `Allocated for ${selected}:${took(taken)}${scattered(table) ? " They need not be neighbours." : ""}`
          : `${selected} already has room for ${tokens(lengths[selected])}.`,
        `block_tables["${selected}"] = [${table.join(", ")}]`,
      );
    }

    function release() {
      dense = null;
      touched = new Set();
      const freed = pool.free(selected);
      draw(
        freed.length ? `Freed ${selected}: ${blocks(freed)} went to the end of the free list, where the next request takes from. The old values stay until they are written over.`
          : `${selected} holds no block.`,
        `free_blocks = [${pool.freeBlocks.join(", ")}]`,
      );
    }

    function nothingToWrite() {
      touched = new Set();
      draw(`${selected} already holds ${tokens(pool.lens[selected])}. Make it longer, or free it.`, "");
    }

    function writeOne() {
      dense = null;
      const name = selected;
      const pos = pool.lens[name];
      if (pos >= lengths[name]) return nothingToWrite();
      const taken = pool.reserve(name, pos + 1);
      if (taken === null) return outOfBlocks(name, pos + 1);
      pool.write(name, pos);
      calls += 1;
      const { block, slot } = pool.place(name, pos);
      const p = pool.blockSize;
      touched = new Set([pool.flat(name, pos)]);
      draw(
        `Wrote token ${pos} of ${name} to block ${block}, slot ${slot}.${took(taken)} The loop goes round once for each token.`,
        `pos   = ${pos}\nblock = block_table[${pos} // ${p}] = block_table[${Math.floor(pos / p)}] = ${block}\nslot  = ${pos} % ${p} = ${slot}\n` +
          `k_pool[${block}, ${slot}] = k[i]   # one copy for one token`,
      );
    }

    function writeAll() {
      dense = null;
      const name = selected;
      const first = pool.lens[name];
      if (first >= lengths[name]) return nothingToWrite();
      const taken = pool.reserve(name, lengths[name]);
      if (taken === null) return outOfBlocks(name, lengths[name]);
      const positions = Array.from({ length: lengths[name] - first }, (_, i) => first + i);
      positions.forEach((pos) => pool.write(name, pos));
      calls += 1;
      const places = positions.map((pos) => pool.place(name, pos));
      touched = new Set(positions.map((pos) => pool.flat(name, pos)));
      const p = pool.blockSize;
      draw(
        `Wrote ${tokens(positions.length)} of ${name} with one indexed assignment.${took(taken)}`,
        `positions      = ${row(positions)}\npositions // ${p} = ${row(positions.map((pos) => Math.floor(pos / p)))}\n` +
          `blocks         = ${row(places.map((place) => place.block))}   # block_table[positions // ${p}]\n` +
          `slots          = ${row(places.map((place) => place.slot))}   # positions % ${p}\n` +
          `k_pool[blocks, slots] = k   # one call for ${tokens(positions.length)}`,
      );
    }

    function prepareGather() {
      const names = NAMES.filter((name) => pool.lens[name] > 0);
      if (!names.length) {
        touched = new Set();
        draw("Nothing to gather: write some tokens first.", "");
        return false;
      }
      if (!dense) {
        const lens = Object.fromEntries(names.map((name) => [name, pool.lens[name]]));
        dense = { names, lens, width: Math.max(...Object.values(lens)), done: new Set() };
      }
      return true;
    }

    // The next dense cell that the triple loop would fill.
    function nextCell() {
      for (let r = 0; r < dense.names.length; r++) {
        for (let c = 0; c < dense.width; c++) {
          const pos = c - (dense.width - dense.lens[dense.names[r]]);
          if (pos >= 0 && !dense.done.has(r + "," + c)) return { r, c, pos, name: dense.names[r] };
        }
      }
      return null;
    }

    function gatherOne() {
      if (dense && !nextCell()) dense = null; // all there: start again
      if (!prepareGather()) return;
      const { r, c, pos, name } = nextCell();
      dense.done.add(r + "," + c);
      calls += 1;
      const { block, slot } = pool.place(name, pos);
      touched = new Set([pool.flat(name, pos)]);
      const total = Object.values(dense.lens).reduce((sum, len) => sum + len, 0);
      draw(
        `Copied token ${pos} of ${name} out of block ${block}, slot ${slot}: ${dense.done.size} of ${total} copies, in one layer.`,
        `pad = ${dense.width} - ${dense.lens[name]} = ${dense.width - dense.lens[name]}\nk[${r}, pad + ${pos}] = k_pool[${block}, ${slot}]   # one copy for one token`,
      );
    }

    function gatherAll() {
      dense = null;
      if (!prepareGather()) return;
      calls += 1;
      const positions = [];
      touched = new Set();
      dense.names.forEach((name, r) => {
        positions.push([]);
        for (let c = 0; c < dense.width; c++) {
          const pos = c - (dense.width - dense.lens[name]);
          positions[r].push(pos);
          if (pos >= 0) {
            dense.done.add(r + "," + c);
            touched.add(pool.flat(name, pos));
          }
        }
      });
      const places = positions.map((list, r) => list.map((pos) => pool.place(dense.names[r], Math.max(pos, 0))));
      const p = pool.blockSize;
      draw(
        `Gathered ${tokens(dense.done.size)} of ${dense.names.length} requests with one indexed read. Padding reads the request's own first slot, then becomes 0.`,
        `positions = ${matrix(positions, 12)}   # below 0: padding\n` +
          `blocks    = ${matrix(places.map((list) => list.map((place) => place.block)), 12)}   # block_tables, at max(positions, 0) // ${p}\n` +
          `slots     = ${matrix(places.map((list) => list.map((place) => place.slot)), 12)}   # max(positions, 0) % ${p}\n` +
          `k = k_pool[blocks, slots]   # one call for all\nk = where(positions >= 0, k, 0)`,
      );
    }

    // B and C are there, A is not written yet, and the free list is out of order: what a pool looks like after some traffic.
    function reset(size) {
      pool = new Pool(size || pool.blockSize);
      selected = "A";
      lengths = { A: 5, B: 3, C: 6 };
      touched = new Set();
      dense = null;
      calls = 0;
      if (pool.blockSize === 4) {
        pool.freeBlocks = [7, 6, 3, 0, 5, 4, 1, 2];
      }
      for (const name of ["B", "C"]) {
        pool.reserve(name, lengths[name]);
        for (let pos = 0; pos < lengths[name]; pos++) pool.write(name, pos);
      }
      draw("B and C are in the pool. Write A: it gets the last block of the free list, wherever that lies.",
        `free_blocks = [${pool.freeBlocks.join(", ")}]`);
    }

    // Three requests come, two of them leave, and one comes back longer: it lands in the holes.
    function fragment() {
      const fill = (name, length) => {
        lengths[name] = length;
        pool.reserve(name, length);
        for (let pos = 0; pos < length; pos++) pool.write(name, pos);
      };
      pool = new Pool(pool.blockSize);
      dense = null;
      calls = 0;
      fill("A", 4);
      fill("B", 3);
      fill("C", 6);
      pool.free("A");
      pool.free("C");
      fill("A", MAX_TOKENS);
      selected = "A";
      touched = new Set(Array.from({ length: MAX_TOKENS }, (_, pos) => pool.flat("A", pos)));
      lengths.C = 9;
      draw(
        `A, B and C came. A and C left, and A came back longer. It lives in ${blocks(pool.tables.A)} now, with others between them, ` +
          "and its table still finds every token. Gather to see it.",
        `block_tables = {"A": [${pool.tables.A.join(", ")}], "B": [${pool.tables.B.join(", ")}]}\nfree_blocks  = [${pool.freeBlocks.join(", ")}]`,
      );
    }

    // -- wiring

    buttons.allocate.addEventListener("click", allocate);
    buttons.free.addEventListener("click", release);
    buttons["write-one"].addEventListener("click", writeOne);
    buttons["write-all"].addEventListener("click", writeAll);
    buttons["gather-one"].addEventListener("click", gatherOne);
    buttons["gather-all"].addEventListener("click", gatherAll);
    buttons.fragment.addEventListener("click", fragment);
    buttons.reset.addEventListener("click", () => reset());
    blockSize.addEventListener("change", () => reset(Number(blockSize.value)));
    for (const name of NAMES) {
      radios[name].addEventListener("change", () => {
        selected = name;
        draw(`Request ${name} is chosen.`);
      });
      lengthInputs[name].addEventListener("change", () => {
        const wanted = Math.round(Number(lengthInputs[name].value)) || 1;
        lengths[name] = Math.min(MAX_TOKENS, Math.max(1, wanted));
        selected = name;
        draw(`Request ${name} wants ${tokens(lengths[name])}.`);
      });
    }

    root.querySelector(".pk-static").replaceWith(live);
    reset(4);
    let width = root.clientWidth;
    new ResizeObserver(() => {
      if (root.clientWidth !== width) {
        width = root.clientWidth;
        drawPicture();
      }
    }).observe(root);
  }

  function boot() {
    const root = document.getElementById("paged-kv-figure");
    if (root) start(root);
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", boot);
  else boot();
})();
