/* What /api/status says, as the views want it. Missing parts become null: an older server shows less, never nothing. */

import {WORD, hueOf, sum} from './words.js';

const AWAY = new Set(['stopped', 'failed']);
const LEAVING = new Set(['draining', 'going_to_sleep', 'stopping']);

/** One picture of everything. `before` is the last one: models that did not change are the same objects again. */
export function look(status, before, at = 0) {
  const devices = (status.devices || []).map(device);
  const ids = new Set(devices.map(one => one.id));
  const hasCard = devices.some(one => !one.isRam);
  const known = before ? before.byId : new Map();
  const models = (status.models || []).map(one => model(one, known.get(one.id), hasCard, one.heard ? (at - one.heard) / 1000 : 0));
  const byId = new Map(models.map(one => [one.id, one]));
  for (const one of devices) one.pieces = pieces(one, models);
  const queue = waiting(status, byId);
  const late = models.filter(one => one.fetch?.waiting);
  return {
    devices, models, byId, hasCard, queue, ids, late,
    cards: hasCard ? devices.filter(one => !one.isRam) : devices,
    ram: hasCard ? devices.find(one => one.isRam) || null : null,
    peers: (status.peers || []).map(one => peer(one, one.heard ? (at - one.heard) / 1000 : 0)),
    waiting: (status.queue?.length ?? sum(models.map(one => one.queued))) + sum(late.map(one => one.fetch.waiting)),
    headline: status.advice?.headline || null,
    adviceCount: status.advice?.count ?? null,
    thrash: status.thrash || [],
    version: status.version || '',
    uptime_s: status.uptime_s,
  };
}

function device(one) {
  return {...one, isRam: one.kind === 'ram' || one.id === 'ram', outside_mib: one.outside_mib || 0, headroom_mib: one.headroom_mib || 0};
}

function peer(one, age) {
  return {...one, since_s: one.since_s == null ? null : one.since_s + age, last_error_s: one.last_error_s == null ? null : one.last_error_s + age};
}

/** How far the files are; `share` null: not known how much there is. */
function fetchOf(fetch, age) {
  if (!fetch) return null;
  const share = fetch.total_bytes ? Math.max(0, Math.min(1, fetch.done_bytes / fetch.total_bytes)) : null;
  return {...fetch, share, waiting: fetch.waiting || 0, eta_s: fetch.eta_s == null ? null : Math.max(0, fetch.eta_s - age), since_s: fetch.since_s == null ? null : fetch.since_s + age};
}

function model(raw, old, hasCard, age) {
  const still = !raw.instances?.length && !raw.queued && !raw.backoff_s && !raw.fetch;
  if (still && old?.raw === raw) return old;
  const signature = still ? JSON.stringify({...raw, heard: 0}) : '';
  if (still && old?.signature === signature) return old;
  const older = s => (s == null ? null : s + age);
  const sooner = s => (s == null ? null : Math.max(0, s - age));
  const instances = raw.instances || [];
  const first = instances[0];
  const isAbsent = !!raw.absent && !first; // under a new reference the old engine may still be leaving
  const devices = [...new Set(instances.flatMap(one => one.devices || []))];
  const level = first?.level || 0;
  const onRam = devices.includes('ram');
  return {
    id: raw.id, raw, signature, hue: hueOf(raw.id), state: raw.state, level, pinned: !!raw.pinned,
    reference: raw.reference || '', absent: isAbsent, fetch: fetchOf(raw.fetch, age), face: !isAbsent ? raw.state : raw.fetch ? 'fetching' : 'absent',
    engine: raw.engine || '', aliases: raw.aliases || [], instances, devices,
    queued: raw.queued || 0, oldest_s: older(raw.oldest_s), eta_s: sooner(raw.eta_s),
    inFlight: sum(instances.map(one => one.in_flight)),
    parallel: raw.parallel ?? first?.parallel ?? null,
    idle_s: older(first?.idle_s), expected_s: sooner(first?.expected_s), next: raw.next ? {...raw.next, in_s: sooner(raw.next.in_s)} : null,
    host_mib: Math.max(0, ...instances.map(hostOf)),
    need_mib: raw.footprint_mib ?? raw.need_mib, cold_s: raw.estimates?.cold_s ?? raw.up_s ?? null, wake_s: wakeOf(raw, level),
    levels: raw.sleep?.levels || [], error: raw.last_error || '', failing: raw.failing ?? !!raw.last_error, blocked: raw.blocked || '',
    trouble: ((raw.failing ?? true) && raw.last_error) || raw.blocked || null, // what is wrong with it now, in a sentence
    retry_s: sooner(raw.retry_in_s ?? (raw.backoff_s || null)), quarantined: !!raw.quarantined,
    rate: raw.rate || first?.rate || null, note: noteOf(raw, first), progress: fresher(first?.progress || raw.progress, raw.state),
    place: AWAY.has(raw.state) ? 'home' : raw.state === 'asleep' || (onRam && hasCard && devices.length === 1) ? 'green' : 'stage',
    onRam, leaving: LEAVING.has(raw.state),
  };
}

function noteOf(raw, first) {
  const gate = first?.gated_for ?? raw.gated_for;
  if (gate) return `gated: ${gate} is next`;
  if (raw.absent && !first) return ''; // its state says it all
  const progress = fresher(first?.progress || raw.progress, raw.state);
  if (progress) return [progress.phase, progress.fraction == null ? '' : `${Math.round(progress.fraction * 100)} %`].filter(Boolean).join(' ');
  if (raw.note) return raw.note;
  const turn = raw.quantum;
  return turn && turn.owed_s ? `turn ${Math.round(turn.served_s)} of ${Math.round(turn.owed_s)} s` : '';
}

/** What progress says beyond the state's own word. */
function fresher(progress, state) {
  if (!progress) return null;
  const phase = progress.phase === WORD[state] ? '' : progress.phase || '';
  return phase || progress.fraction != null ? {...progress, phase} : null;
}

function wakeOf(raw, level) {
  if (raw.estimates?.wake_s != null) return raw.estimates.wake_s;
  const costs = raw.sleep?.costs || [];
  const cost = costs.find(one => one.level === level) || (level ? null : costs[0]);
  return cost ? cost.wake_s : null;
}

const hostOf = one => one.reserved_by_device_mib?.ram ?? one.ram_mib ?? one.host_mib ?? 0;

/** Who holds how much of a device, sleepers last: their residues stay where they are while others come and go. */
function pieces(one, models) {
  const out = [];
  for (const model of models) {
    model.instances.forEach((instance, index) => {
      const size = share(instance, 'reserved', one.id);
      if (!size) return;
      const fill = share(instance, 'measured', one.id);
      const copy = one.isRam && !(instance.devices || []).includes('ram');
      out.push({model, instance, index, size, fill, copy, key: `${model.id}\n${index}`, state: instance.state, isLinked: (instance.devices || []).length > 1});
    });
  }
  return out.sort((a, b) => (a.state === 'asleep') - (b.state === 'asleep'));
}

function share(instance, what, id) {
  const by = instance[`${what}_by_device_mib`];
  if (by && (id in by || Object.keys(by).length)) return by[id] ?? (what === 'measured' ? null : 0);
  const devices = instance.devices || [];
  if (!devices.includes(id)) return what === 'reserved' && id === 'ram' ? instance.ram_mib || 0 : what === 'reserved' ? 0 : null;
  const total = instance[`${what}_mib`];
  return total == null ? null : total / devices.length;
}

/** The queue, longest need first said: as the server tells it, else from the models themselves. */
function waiting(status, byId) {
  const told = status.queue?.models;
  if (Array.isArray(told)) {
    return told.filter(one => byId.has(one.model)).map(one => ({...one, m: byId.get(one.model), stages: one.stages || [], requests: one.requests || []}));
  }
  return [...byId.values()].filter(one => one.queued).map(one => ({
    m: one, model: one.id, eta_s: one.eta_s, reason: '', stages: [], requests: [], oldest_s: one.oldest_s,
  })).sort((a, b) => (a.eta_s ?? 1e9) - (b.eta_s ?? 1e9));
}
