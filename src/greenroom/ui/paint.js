/* The painter: a description of elements becomes the page, by the smallest change.
   Focus, selection, scroll and hover survive each update, because nodes are kept and not made anew.
   Text is only ever a text node; styles go through the CSSOM, which a strict style-src allows. */

const SVG = 'http://www.w3.org/2000/svg';
const LIVE = new Set(['value', 'checked']); // what a user changes: set last, and never under the cursor

/** An element: h('p', {class: 'x', onclick: f, style: {width: '3px'}}, 'text', more). */
export function h(tag, props, ...kids) {
  return {tag, props: props || {}, kids: flatten(kids, [])};
}

/** An element that is described again only when one of `deps` has changed. `make` returns the same tag each time. */
export function lazy(key, deps, make) {
  return {key, deps, make};
}

function flatten(kids, out) {
  for (const kid of kids) {
    if (Array.isArray(kid)) flatten(kid, out);
    else if (kid != null && kid !== true && kid !== false && kid !== '') out.push(typeof kid === 'object' ? kid : String(kid));
  }
  return out;
}

/** Makes the children of `el` what `kids` describe. */
export function paint(el, kids, ns = null) {
  const wanted = flatten([kids], []);
  const nodes = pick(el, wanted, ns);
  const kept = new Set(nodes);
  for (const node of [...el.childNodes]) if (!kept.has(node)) node.remove(); // first, so that what stays need not move
  let at = el.firstChild;
  for (const node of nodes) {
    if (node === at) at = at.nextSibling;
    else el.insertBefore(node, at);
  }
}

/** For each description its node: an old one of the same key, else of the same tag, else a new one. */
function pick(el, wanted, ns) {
  const keyed = new Map();
  const loose = new Map();
  for (const node of el.childNodes) {
    if (node._key != null) keyed.set(node._key, node);
    else loose.set(node.nodeName, [...(loose.get(node.nodeName) || []), node]);
  }
  return wanted.map(one => {
    if (typeof one === 'string') return text(loose.get('#text')?.shift(), one);
    const key = one.deps ? one.key : one.props.key;
    let old;
    if (key != null) {
      old = keyed.get(key);
      keyed.delete(key);
      if (old && one.tag && old.localName !== one.tag) old = null;
    } else {
      old = loose.get(ns || one.tag === 'svg' ? one.tag : one.tag.toUpperCase())?.shift();
    }
    return element(old, one, ns);
  });
}

function text(node, value) {
  if (!node) return document.createTextNode(value);
  if (node.data !== value) node.data = value;
  return node;
}

function element(node, one, ns) {
  if (one.deps) {
    if (node?._deps && same(node._deps, one.deps)) return node;
    const made = one.make();
    made.props.key = one.key;
    const out = element(node && node.localName === made.tag ? node : null, made, ns);
    out._deps = one.deps;
    return out;
  }
  const space = one.tag === 'svg' ? SVG : ns;
  const el = node || (space ? document.createElementNS(space, one.tag) : document.createElement(one.tag));
  dress(el, el._props || {}, one.props);
  el._props = one.props;
  el._key = one.props.key;
  paint(el, one.kids, space);
  for (const name of LIVE) {
    if (name in one.props && el[name] !== one.props[name] && document.activeElement !== el) el[name] = one.props[name];
  }
  return el;
}

function same(a, b) {
  return a.length === b.length && a.every((value, i) => value === b[i]);
}

function dress(el, old, now) {
  for (const name in old) if (!(name in now)) set(el, name, null, old[name]);
  for (const name in now) if (now[name] !== old[name]) set(el, name, now[name], old[name]);
}

function set(el, name, value, before) {
  if (name === 'key' || LIVE.has(name)) return;
  if (name === 'style') restyle(el, before || {}, value || {});
  else if (name.startsWith('on')) el[name] = value || null;
  else if (value == null || value === false) el.removeAttribute(name);
  else el.setAttribute(name, value === true ? '' : value);
}

function restyle(el, old, now) {
  for (const name in old) if (!(name in now)) el.style.removeProperty(name);
  for (const name in now) if (now[name] !== old[name]) el.style.setProperty(name, now[name]);
}
