/**
 * A table of thousands of rows, of which only those in sight are elements. Rows have one height. An element is used
 * again for another row when it leaves the sight, so scrolling makes none.
 *
 * Keys: arrows, PageUp, PageDown, Home and End move between rows; the link in a row opens it.
 */

import { el, setAll } from "./dom.js";

const BEYOND = 3; // rows above and below the sight

export class VirtualList {
  #scroller;
  #space = el("div.space", { role: "presentation" });
  #table;
  #makeRow;
  #slots = []; // {view, index}
  #items = [];
  #active = 0; // the row that the keyboard is at
  #frame = null;
  #rowHeight = 0;
  #lastTop = 0; // where it was scrolled to when it was drawn last
  #resized = new ResizeObserver(() => this.#measure());

  /**
   * @param {string} label @param {Element} head - the row of headings
   * @param {function(): {element: Element, link: Element, show: function(item)}} makeRow
   */
  constructor(label, head, makeRow) {
    this.#makeRow = makeRow;
    this.#scroller = el(
      "div.scroller",
      {
        role: "rowgroup",
        tabindex: "-1",
        scroll: () => this.#later(),
        keydown: (event) => this.#onKey(event),
        focusin: (event) => this.#onFocus(event),
      },
      this.#space,
    );
    this.#table = el(
      "div.virtual",
      { role: "table", "aria-label": label },
      el("div.virtual-head", { role: "rowgroup" }, head),
      this.#scroller,
    );
    this.element = this.#table;
    this.#resized.observe(this.#scroller);
  }

  /** Shows these items. */
  show(items) {
    this.#items = items;
    this.#active = Math.min(this.#active, Math.max(0, items.length - 1));
    setAll(this.#table, { "aria-rowcount": items.length + 1 });
    this.#later();
  }

  /** True where the first row is in sight. */
  get atTop() {
    return this.#scroller.scrollTop < Math.max(1, this.#rowHeight / 2);
  }

  /** True while the keyboard is in one of the rows. */
  get hasFocus() {
    return this.#space.contains(document.activeElement);
  }

  /** Takes the keyboard, which is in no row then. */
  focus() {
    this.#scroller.focus({ preventScroll: true });
  }

  toTop() {
    this.#scroller.scrollTop = 0;
    this.#active = 0;
    this.#later();
  }

  close() {
    this.#resized.disconnect();
    if (this.#frame !== null) cancelAnimationFrame(this.#frame);
  }

  #measure() {
    this.#rowHeight = parseFloat(getComputedStyle(this.#table).getPropertyValue("--row-height"));
    for (const slot of this.#slots) slot.index = -1;
    this.#later();
  }

  #later() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      this.#draw();
    });
  }

  #draw() {
    const seen = this.#scroller.clientHeight;
    if (this.#rowHeight === 0 || seen === 0) return;
    this.#space.style.height = `${this.#items.length * this.#rowHeight}px`;
    const top = this.#scroller.scrollTop;
    const beyond = Math.abs(top - this.#lastTop) > seen ? 0 : BEYOND; // in a jump those in sight are work enough
    this.#lastTop = top;
    const first = Math.max(0, Math.floor(top / this.#rowHeight) - beyond);
    const last = Math.min(this.#items.length, Math.ceil((top + seen) / this.#rowHeight) + beyond);
    this.#provide(Math.ceil(seen / this.#rowHeight) + 2 * BEYOND + 1);
    const stop = Math.min(Math.max(this.#active, first), last - 1); // for the Tab key
    for (const [number, slot] of this.#slots.entries()) {
      const size = this.#slots.length;
      const index = first + ((((number - first) % size) + size) % size); // each row has always the same slot
      this.#place(slot, index < last ? index : null, index === stop);
    }
  }

  #provide(number) {
    while (this.#slots.length < number) {
      const view = this.#makeRow();
      this.#space.append(view.element);
      this.#slots.push({ view, index: -1 });
    }
  }

  #place(slot, index, isStop) {
    const { element, link } = slot.view;
    if (index !== slot.index) {
      if (element.contains(document.activeElement)) this.focus();
      element.hidden = index === null;
      slot.index = index;
      if (index !== null) {
        element.style.top = `${index * this.#rowHeight}px`;
        setAll(element, { "aria-rowindex": index + 2 });
      }
    }
    if (index === null) return;
    slot.view.show(this.#items[index]);
    link.tabIndex = isStop ? 0 : -1;
  }

  #onFocus(event) {
    const slot = this.#slots.find(({ view }) => view.element.contains(event.target));
    if (slot) this.#active = slot.index;
  }

  #onKey(event) {
    const page = Math.max(1, Math.floor(this.#scroller.clientHeight / this.#rowHeight) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const step = steps[event.key];
    if (step === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.#goTo(Math.min(this.#items.length - 1, Math.max(0, this.#active + step)));
  }

  #goTo(index) {
    if (index < 0) return;
    this.#active = index;
    const top = index * this.#rowHeight;
    const bottom = top + this.#rowHeight - this.#scroller.clientHeight;
    if (this.#scroller.scrollTop > top) this.#scroller.scrollTop = top;
    if (this.#scroller.scrollTop < bottom) this.#scroller.scrollTop = bottom;
    this.#draw();
    this.#slots.find((slot) => slot.index === index)?.view.link.focus({ preventScroll: true });
  }
}
