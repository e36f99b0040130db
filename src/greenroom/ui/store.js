/* What the page knows. One object, changed only through `put`, and whoever listens is told once. */

export const store = {
  link: 'connecting', // connecting | live | lost | denied | error
  problem: null, // the Refusal behind denied and error
  lostAt: null, // unix seconds, of the server's clock
  retryAt: null, // performance.now()
  picture: null, // look(status)
  events: [], // newest first
  me: null, // {key_name, scopes}; null: this server does not tell
  timeline: undefined, // undefined: not asked yet; null: this server has none
  stories: {}, // model -> {at, story}
  version: 0,
};

/* What the user chose; page, model and filters are in the address. */
export const ui = {held: false, find: '', explain: '', open: {}, shortcuts: true, chat: null};

const listeners = new Set();
let clockAt = null; // unix seconds of the server ...
let clockSeen = 0; // ... when performance.now() was this

export function onChange(listener) {
  listeners.add(listener);
}

export function put(changes = {}) {
  Object.assign(store, changes);
  store.version++;
  for (const listener of listeners) listener();
}

/** The server said what time it is. A value that is rounded to seconds only corrects what is clearly off. */
export function setClock(at, isRounded = false) {
  if (!at || (isRounded && clockAt != null && Math.abs(at - serverNow()) < 1.5)) return;
  clockAt = at;
  clockSeen = performance.now();
}

/** Unix seconds, by the server's clock; the browser's own may be hours off. */
export function serverNow() {
  return clockAt == null ? Date.now() / 1000 : clockAt + (performance.now() - clockSeen) / 1000;
}

/** How many seconds ago the picture was true; ages in it grow by that. */
export function pictureAge() {
  return store.picture ? (performance.now() - store.picture.seen) / 1000 : 0;
}

export const may = scope => !store.me?.scopes || store.me.scopes.includes(scope);
export const isAway = () => store.link !== 'live';

/** Why the last fetch of a model came to nothing; '' = it did not, or that is long ago. */
export function fetchFault(id) {
  const last = store.events.find(one => one.model === id && /^fetch/.test(one.kind));
  return last?.kind === 'fetch_failed' ? last.text : '';
}

/** Why buttons do not work now; '' = they do. */
export function lockedBecause() {
  if (store.link === 'lost' || store.link === 'error') return 'No connection: buttons wait';
  if (!may('admin')) return 'Your key may look, not change';
  return '';
}

/* The address: #/page/ID?filter=value */
export function route() {
  const [path, query = ''] = location.hash.replace(/^#\/?/, '').split('?');
  const [page = '', ...rest] = path.split('/');
  let id = rest.join('/');
  try {
    id = decodeURIComponent(id);
  } catch { /* as it stands */ }
  return {page: page || 'stage', id, query: new URLSearchParams(query)};
}

export function setQuery(name, value) {
  const {page, id, query} = route();
  if (value) query.set(name, value);
  else query.delete(name);
  const text = query.toString();
  history.replaceState(null, '', `#/${page}${id ? `/${encodeURIComponent(id)}` : ''}${text ? `?${text}` : ''}`);
  put();
}

export const modelHref = id => `#/model/${encodeURIComponent(id)}`;
