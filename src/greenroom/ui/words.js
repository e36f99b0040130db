/* Figures and states as people read them. MiB come in, GiB go out; seconds are rounded to what can be known. */

export const WORD = {
  ready: 'ready', draining: 'draining', going_to_sleep: 'going to sleep', asleep: 'asleep', waking: 'waking',
  starting: 'starting', stopping: 'stopping', stopped: 'stopped', failed: 'failed', fetching: 'fetching', absent: 'not here yet',
};
export const CAUSES = ['queue', 'gate', 'load or wake', 'first token', 'generation'];
export const PHASES = ['spawn', 'listen', 'weights', 'compile', 'graphs', 'first answer'];
export const NBSP = '\u00a0';

/** MiB as GiB without the unit. */
export function gib(mib) {
  if (mib == null) return '–';
  const value = mib / 1024;
  return value >= 100 ? value.toFixed(0) : value < 0.05 ? '0' : value.toFixed(1);
}

/** A size on a disk or a line, with its unit. */
export function bytes(n) {
  const mib = n / 2 ** 20;
  if (mib >= 1024) return `${gib(mib)}${NBSP}GiB`;
  return `${mib >= 10 ? Math.round(mib) : mib.toFixed(1)}${NBSP}MiB`;
}

export function sec(s) {
  if (s == null || !isFinite(s)) return '–';
  if (s < 0.0095) return `${Math.round(Math.max(0, s) * 1000)}${NBSP}ms`;
  if (s < 0.95) return `${Math.round(s * 100) * 10}${NBSP}ms`;
  if (s < 9.95) return `${s.toFixed(1).replace(/\.0$/, '')}${NBSP}s`;
  if (s < 180) return `${Math.round(s)}${NBSP}s`;
  if (s < 5400) return `${Math.floor(s / 60)}${NBSP}min`;
  if (s < 129600) return `${Math.round(s / 3600)}${NBSP}h`;
  return `${Math.round(s / 86400)}${NBSP}days`;
}

/** An expectation. */
export const about = s => (s == null ? '' : `≈${NBSP}${sec(s)}`);

const two = n => String(n).padStart(2, '0');

/** Unix seconds as a time of day here. */
export function clock(at, short) {
  if (at == null) return '–';
  const d = new Date(at * 1000);
  return [d.getHours(), d.getMinutes(), ...(short ? [] : [d.getSeconds()])].map(two).join(':');
}

/** The same, with the day when that is not today. */
export function moment(at, now) {
  if (at == null) return '–';
  const d = new Date(at * 1000);
  return d.toDateString() === new Date(now * 1000).toDateString() ? clock(at) : `${d.toLocaleDateString('en', {weekday: 'short'})} ${clock(at, true)}`;
}

export const many = (n, one, more = `${one}s`) => `${n.toLocaleString('en')} ${n === 1 ? one : more}`;
export const percent = x => `${Math.round(x * 100)}${NBSP}%`;
/** A sentence of the server's, with its full stop. */
export const ended = text => (/[.!?…]$/.test(text) ? text : `${text}.`);
export const sum = list => list.reduce((a, b) => a + (b || 0), 0);

/** A model's hue, always the same for the same name, whoever looks. */
export function hueOf(id) {
  let hash = 2166299693; // a start from which common names come out well apart
  for (let i = 0; i < id.length; i++) hash = Math.imul(hash ^ id.charCodeAt(i), 16777619);
  hash = Math.imul(hash ^ (hash >>> 15), 2246822519); // names often differ in their last letters only
  return ((hash ^ (hash >>> 13)) >>> 0) % 360;
}

/** The part of a name that families share. */
export function familyOf(id) {
  return id.split(/[-/:]/)[0] || id;
}

/** Lists by family; those alone in theirs come together at the end. */
export function families(list) {
  const by = new Map();
  for (const one of list) by.set(familyOf(one.id), [...(by.get(familyOf(one.id)) || []), one]);
  const alone = [...by.values()].filter(group => group.length === 1).flat();
  const groups = [...by].filter(([, group]) => group.length > 1);
  return alone.length ? [...groups, ['others', alone]] : groups;
}
