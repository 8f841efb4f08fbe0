/**
 * Elements without markup in strings: whatever comes from a server becomes a text node or an attribute, never HTML.
 */

const SVG = "http://www.w3.org/2000/svg";
const keptLists = new WeakMap();

/**
 * Makes an element of HTML.
 *
 * @param {string} name - the element's, classes after points: "p.note.small"
 * @param {Object} [attributes] - by name. A function is a listener of the event of that name; true is an attribute
 *   without a value; null, undefined and false leave the attribute out. `value`, `checked` and `disabled` are set as
 *   properties.
 * @param {...(Node|string|number|null|Array)} children - null, undefined and false are left out
 */
export function el(name, ...rest) {
  return fill(document.createElement(name.split(".")[0]), name, rest);
}

/** Makes an element of SVG; the parameters are those of `el`. */
export function svg(name, ...rest) {
  return fill(document.createElementNS(SVG, name.split(".")[0]), name, rest);
}

function fill(element, name, rest) {
  const classes = name.split(".").slice(1);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  const hasAttributes = rest[0]?.constructor === Object;
  if (hasAttributes) setAll(element, rest[0]);
  element.append(...present(hasAttributes ? rest.slice(1) : rest));
  return element;
}

function present(children) {
  return children.flat(2).filter((child) => child !== null && child !== undefined && child !== false);
}

/** Sets attributes as `el` does. */
export function setAll(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else if (value === null || value === undefined || value === false) element.removeAttribute(name);
    else element.setAttribute(name, value === true ? "" : value);
  }
}

/** Sets an element's text, if it is another one. */
export function setText(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** Puts children in the place of all that an element has. */
export function replace(element, ...children) {
  element.replaceChildren(...present(children));
}

/**
 * Shows a list of things as children of `parent`, and keeps the element of a thing that stays: what has the focus keeps
 * it, and nothing flickers.
 *
 * @param {Element} parent - has no other children
 * @param {Array} items
 * @param {function(item): string} keyOf - the item's name, unlike that of any other
 * @param {function(item): {element: Element, update: function(item)}} make - called once for each name
 */
export function showList(parent, items, keyOf, make) {
  const kept = keptLists.get(parent) ?? new Map();
  const next = new Map();
  for (const item of items) {
    const key = keyOf(item);
    const view = kept.get(key) ?? make(item);
    view.update(item);
    next.set(key, view);
  }
  for (const [key, view] of kept) if (!next.has(key)) view.element.remove();
  keptLists.set(parent, next);
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  placeInOrder(parent, [...next.values()]);
  if (focused !== document.activeElement) focused?.focus({ preventScroll: true }); // what is moved loses it
}

function placeInOrder(parent, views) {
  let wanted = parent.firstChild;
  for (const { element } of views) {
    if (wanted === element) wanted = element.nextSibling;
    else parent.insertBefore(element, wanted);
  }
}

/**
 * Shows parts as children of `parent`, and makes those anew that differ from what is shown.
 *
 * @param {Element} parent - has no other children
 * @param {Array<{of: any, make: function(): Element}>} parts - of: all that a part shows, as JSON has it
 */
export function showParts(parent, parts) {
  const number = new Map(); // of parts so far that show the same
  const named = parts.map((part) => {
    const name = JSON.stringify(part.of);
    number.set(name, (number.get(name) ?? 0) + 1);
    return { ...part, name: `${number.get(name)} ${name}` };
  });
  const make = (part) => ({ element: part.make(), update: () => undefined });
  showList(parent, named, (part) => part.name, make);
}

let lastId = 0;

/** An id that no other element has. */
export function newId(what) {
  lastId += 1;
  return `${what}-${lastId}`;
}
