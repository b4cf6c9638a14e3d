"use strict";
// Let the tables below an element be sorted: numbers by their values, other cells by their text.
// Show the value of a point of a drawing where the pointer is.
function prepare(root) {
  for (const table of root.querySelectorAll(".scroll table")) {
    const body = table.tBodies[0];
    if (body.rows.length < 2 && !table.id) continue;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.tabIndex = 0;
      head.classList.add("sortable");
      const sort = () => {
        const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        const key = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent.trim();
        const numeric = [...body.rows].some((row) => row.cells[column].dataset.v !== undefined);
        const order = (a, b) => {
          if (!numeric) return key(a).localeCompare(key(b), undefined, { numeric: true }) * down;
          const [x, y] = [parseFloat(key(a)), parseFloat(key(b))];
          if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
          return (x - y) * down;
        };
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
        body.append(...[...body.rows].sort(order));
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); }
      });
    });
  }
  for (const mark of root.querySelectorAll("svg .tip")) {
    const title = mark.querySelector("title");
    mark.dataset.tip = title.textContent;
    title.remove();
  }
}
const tip = document.createElement("div");
tip.className = "tooltip";
tip.hidden = true;
document.body.append(tip);
document.addEventListener("pointerover", (event) => {
  const mark = event.target.closest?.("svg .tip");
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.dataset.tip;
  const box = mark.getBoundingClientRect();
  const left = box.left + box.width / 2 - tip.offsetWidth / 2;
  const most = document.documentElement.clientWidth - tip.offsetWidth - 4;
  tip.style.left = `${window.scrollX + Math.max(4, Math.min(left, most))}px`;
  tip.style.top = `${window.scrollY + box.top - tip.offsetHeight - 6}px`;
});
prepare(document);
