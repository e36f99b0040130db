/* The state: read whole, or told in pieces by the stream; each time a new picture is made of it. */

import {call} from './api.js';
import {look} from './look.js';
import {put, setClock, store, ui} from './store.js';

let raw = null; // as /api/status has it; each model with `heard`, when it was told (performance.now())
let boot = null;
let uptime_s = 0;

/** Asks for the whole state; true when another server answers than before. */
export async function readState(signal) {
  const response = await call('api/status', {signal});
  const status = await response.json();
  const date = Date.parse(response.headers.get('Date') || '');
  if (!status.now && date) setClock(date / 1000, true);
  return changed({kind: 'snapshot', ...status});
}

/** Takes a whole state, or the parts of it that changed; true when another server tells it than before. */
export function changed(message) {
  const heard = performance.now();
  if (message.now) setClock(message.now);
  const tag = list => (list || []).map(one => ({...one, heard}));
  const tagged = tag(message.models);
  if (message.kind === 'snapshot' || !raw) {
    raw = {...message, models: tagged, peers: tag(message.peers)};
  } else {
    const gone = new Set(message.removed || []);
    raw = {
      ...raw, ...pick(message, ['now', 'uptime_s', 'queue', 'advice', 'thrash']),
      devices: merged(raw.devices, message.devices || []), models: merged(raw.models.filter(one => !gone.has(one.id)), tagged),
      peers: message.peers ? tag(message.peers) : raw.peers,
    };
  }
  const isAnother = message.boot_id ? boot !== null && boot !== message.boot_id : (message.uptime_s ?? uptime_s) < uptime_s - 1;
  boot = message.boot_id ?? boot;
  uptime_s = message.uptime_s ?? uptime_s;
  show();
  return isAnother;
}

/** Makes the picture anew: figures that only age go on between two messages. */
export function show() {
  if (!raw || ui.held) return;
  const picture = look(raw, store.picture, performance.now());
  picture.seen = performance.now();
  put({picture});
}

export const isBusy = () => !!store.picture?.models.some(one => one.fetch || one.queued || one.inFlight || one.leaving || one.state === 'starting' || one.state === 'waking');

const pick = (from, names) => Object.fromEntries(names.filter(name => name in from).map(name => [name, from[name]]));

/** The old list with the new entries in their old places, and those that are new at the end. */
function merged(old, fresh) {
  const by = new Map(fresh.map(one => [one.id, one]));
  const out = (old || []).map(one => {
    const now = by.get(one.id) || one;
    by.delete(one.id);
    return now;
  });
  return [...out, ...by.values()];
}
