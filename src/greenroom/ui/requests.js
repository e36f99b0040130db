/* The requests as the server remembers them: read while somebody looks at them, older ones on demand. */

import {jsonOrNull} from './api.js';
import {put, store, ui} from './store.js';

const AGAIN_MS = 1500;
const LIMIT = 100;
const KEPT_MAX = 1000; // ended ones; as many more as were asked for with `Show older ones`

export const isOpen = one => one.outcome === 'waiting' || one.outcome === 'running';

let now = {filter: null, rows: [], cursor: null, isMissing: false, isReading: false, at: 0, problem: '', readAt: 0, older: 0, ends: []};

/** What is known for a filter; reads again by itself. */
export function rowsOf(filter) {
  if (now.filter !== filter) now = {...now, filter, rows: [], cursor: null, at: -AGAIN_MS, readAt: 0, older: 0, ends: []};
  if (!ui.held && !now.isReading && !now.isMissing && performance.now() - now.at > AGAIN_MS && store.link === 'live') read(now, '');
  return now;
}

export const readOlder = () => read(now, now.cursor);

async function read(mine, cursor) {
  mine.isReading = true;
  mine.at = performance.now();
  try {
    const answer = await jsonOrNull(`api/requests?${mine.filter}&limit=${LIMIT}${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ''}`);
    if (answer === null) {
      mine.isMissing = true;
    } else {
      take(mine, (Array.isArray(answer) ? answer : answer.requests || []).map(plain), cursor, answer.cursor ?? answer.next ?? null);
      mine.readAt = performance.now();
    }
    mine.problem = '';
  } catch (error) {
    mine.problem = error.message;
  }
  mine.isReading = false;
  put();
}

/** One more page: the newest, or that after `cursor`. The list has no holes, and is not longer than somebody may want to read. */
function take(mine, page, cursor, next) {
  const known = new Map(mine.rows.map(one => [one.id, one]));
  const rows = page.map(one => (known.get(one.id)?.signature === one.signature ? known.get(one.id) : one)); // the same object is not painted again
  const isHole = !cursor && next && mine.rows.some(one => !isOpen(one)) && !rows.some(one => !isOpen(one) && known.has(one.id)); // more came than one page holds
  const fresh = new Set(rows.map(one => one.id));
  const kept = isHole ? [] : mine.rows.filter(one => !fresh.has(one.id) && (cursor || !isOpen(one))); // one that was open and is not told any more has ended unseen
  mine.rows = mergedInOrder([...rows, ...kept]);
  if (isHole) Object.assign(mine, {older: 0, ends: []});
  if (cursor) mine.older += rows.length;
  else if (next && rows.length) mine.ends = [{id: rows.at(-1).id, cursor: next}, ...mine.ends.filter(one => one.id !== rows.at(-1).id)];
  if (cursor || !mine.cursor || isHole) mine.cursor = next;
  forget(mine);
}

/** Lets go of the oldest, where a page ended: from there they can be read again. */
function forget(mine) {
  const most = KEPT_MAX + mine.older;
  if (mine.rows.length <= most) return;
  const places = new Map(mine.rows.map((one, i) => [one.id, i]));
  mine.ends = mine.ends.filter(one => places.get(one.id) < most);
  const last = mine.ends.at(-1);
  if (!last) return;
  mine.rows.length = places.get(last.id) + 1;
  mine.cursor = last.cursor;
}

/** Those that are open first, each part newest first. */
const mergedInOrder = rows => rows.sort((a, b) => isOpen(b) - isOpen(a) || b.at - a.at);

function plain(one) {
  const wait = one.wait || {};
  return {
    ...one, signature: JSON.stringify(one), key: one.key_name || '', parts: [wait.queue || 0, wait.gate || 0, wait.load || 0, one.first_token_s || 0, one.generation_s || 0],
    waited: (wait.queue || 0) + (wait.gate || 0) + (wait.load || 0), outcome: one.outcome || 'ok',
  };
}

/** The same with the time that has passed since it was read, added where it is spent. */
export function grown(one, readAt) {
  if (!isOpen(one) || ui.held || store.link !== 'live') return one;
  const more = (performance.now() - readAt) / 1000;
  const parts = one.parts.slice();
  const at = one.outcome === 'running' ? (parts[4] || parts[3] ? 4 : 3) : Math.max(0, parts.findLastIndex((value, i) => i < 3 && value > 0));
  parts[at] += more;
  return {...one, parts, waited: one.outcome === 'waiting' ? one.waited + more : one.waited};
}
