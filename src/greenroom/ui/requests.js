/* The requests as the server remembers them: read while somebody looks at them, older ones on demand. */

import {jsonOrNull} from './api.js';
import {put, store, ui} from './store.js';

const AGAIN_MS = 1500;
const LIMIT = 100;

export const isOpen = one => one.outcome === 'waiting' || one.outcome === 'running';

let now = {filter: null, rows: [], cursor: null, isMissing: false, isReading: false, at: 0, problem: '', readAt: 0};

/** What is known for a filter; reads again by itself. */
export function rowsOf(filter) {
  if (now.filter !== filter) now = {...now, filter, rows: [], cursor: null, at: -AGAIN_MS, readAt: 0};
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
      const rows = (Array.isArray(answer) ? answer : answer.requests || []).map(plain);
      const fresh = new Set(rows.map(one => one.id));
      const kept = mine.rows.filter(one => !fresh.has(one.id) && (cursor || !isOpen(one))); // one that was open and is not told any more has ended unseen
      mine.rows = mergedInOrder([...rows, ...kept]);
      if (cursor || !mine.cursor) mine.cursor = answer.cursor ?? answer.next ?? null;
      mine.readAt = performance.now();
    }
    mine.problem = '';
  } catch (error) {
    mine.problem = error.message;
  }
  mine.isReading = false;
  put();
}

/** Those that are open first, each part newest first. */
const mergedInOrder = rows => rows.sort((a, b) => isOpen(b) - isOpen(a) || b.at - a.at);

function plain(one) {
  const wait = one.wait || {};
  return {
    ...one, key: one.key_name || '', parts: [wait.queue || 0, wait.gate || 0, wait.load || 0, one.first_token_s || 0, one.generation_s || 0],
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
