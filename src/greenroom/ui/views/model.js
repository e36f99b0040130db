/* One model: what it does and why, its starts, what it needs, its day, its log, and every button. */

import {button, wordFor} from '../acts.js';
import {json, path} from '../api.js';
import {closeLog} from '../follow.js';
import {ensureStory} from '../live.js';
import {h} from '../paint.js';
import {blank, legend, meter, nameOf, rateOf, stack, stateOf, storyOf, unavailable} from '../parts.js';
import {fetchFault, onChange, put, route, serverNow, store} from '../store.js';
import {PHASES, gib, many, moment, sec, sum} from '../words.js';
import {day} from './day.js';
import {files} from './files.js';
import {log} from './log.js';

const AGAIN_MS = 4000;
const PHASE_KEYS = ['spawn', 'listen', 'weights', 'compile', 'graphs', 'first_answer'];
const FOOTPRINTS = [['declared', 'declared in the config', 'q0'], ['estimated', 'estimated from files and flags', 'q0'], ['measured', 'measured', 'q3'], ['learned', 'learned', 'q4']];

let details = {id: null, value: null, at: 0, isReading: false};

export function model(picture, {id}) {
  const m = picture.byId.get(id);
  if (!m) return unknown(picture, id);
  ensureDetails(m);
  ensureStory(m.id, !!m.queued || m.inFlight > 0 || m.leaving || !!m.fetch || m.state === 'starting' || m.state === 'waking');
  const more = details.id === m.id ? details.value : null;
  return h('div', {class: 'pad'}, top(m), facts(m, more), wordFor(m.id), files(m, fetchFault(m.id)),
    m.error ? h('p', {class: m.failing ? 'bad said' : 'mut said'}, m.failing ? m.error : `The last error, before it was ready again: ${m.error}`) : null, m.blocked && m.blocked !== m.error ? h('p', {class: 'warn said'}, m.blocked) : null,
    more?.missing && more.missing !== m.blocked ? h('p', {class: 'bad said'}, more.missing) : null,
    h('div', {class: 'two'}, starts(m, more), footprint(m, more),
      h('section', {key: 'why'}, h('h2', {}, 'Why'), storyOf(store.stories[m.id], at => moment(at, serverNow()))),
      h('section', {key: 'day'}, h('h2', {}, 'Last 24 h'), more?.day ? day(more.day, serverNow()) : unavailable('Not available yet.', 'This server keeps no history of a day.')),
      log(m)));
}

/** Leaving the page gives up what only it needed. */
onChange(() => {
  const at = route();
  if (at.page !== 'model') closeLog();
});
addEventListener('hashchange', () => {
  if (route().page !== 'model') closeLog();
});

async function ensureDetails(m) {
  const isOld = performance.now() - details.at > AGAIN_MS || details.state !== m.state;
  if (details.id === m.id && (details.isReading || !isOld)) return;
  const mine = details = {id: m.id, value: details.id === m.id ? details.value : null, at: performance.now(), state: m.state, isReading: true};
  try {
    mine.value = await json(path(m.id));
  } catch { /* what is known stays */ }
  mine.isReading = false;
  put();
}

function unknown(picture, id) {
  const near = picture.models.filter(one => one.id.slice(0, 3) === id.slice(0, 3) || one.aliases.includes(id)).slice(0, 3);
  return blank('No such model', h('p', {}, `Nothing in this configuration is called “${id}”.`,
    near.length ? [' Did you mean ', near.map((one, i) => [i ? ' or ' : '', nameOf(one.id, '')]), '?'] : null), h('p', {}, h('a', {class: 'btn', href: '#/models'}, 'All models')));
}

function top(m) {
  if (m.absent) return h('div', {class: 'head'}, h('h1', {}, h('bdi', {}, m.id)), stateOf(m), h('div', {class: 'acts'},
    button(m, m.pinned ? 'unpin' : 'pin', ''), m.fetch ? button(m, 'stop', 'risk') : button(m, 'fetch', 'go')));
  const verb = m.state === 'stopped' || m.state === 'failed' ? ['load', 'go'] : m.state === 'asleep' ? ['wake', 'go'] : m.state === 'ready' && m.levels.length ? ['sleep', ''] : null;
  return h('div', {class: 'head'}, h('h1', {}, h('bdi', {}, m.id)), stateOf(m), m.note ? h('span', {class: 'mut'}, m.note) : null,
    h('div', {class: 'acts'}, button(m, m.pinned ? 'unpin' : 'pin', ''), verb ? button(m, ...verb) : null,
      m.instances.length ? button(m, 'unload', 'risk') : null));
}

function facts(m, more) {
  const instance = m.instances[0];
  const asked = more?.requests ? sum(Object.values(more.requests)) : null;
  const running = m.parallel ?? more?.parallel ? `${m.inFlight} of ${m.parallel ?? more.parallel}` : m.inFlight;
  const list = [['from', m.reference], ['engine', m.engine], ['device', m.absent ? '' : m.devices.join(', ') || 'none'], ['running', m.absent ? '' : running], ['waiting', m.queued + (m.fetch?.waiting || 0)],
    ['speed', rateOf(m)], ['requests', asked], ['starts', m.raw.starts], ['wakes', m.raw.wakes || ''], ['made to leave', m.raw.evictions || ''],
    ['priority', more?.priority], ['stops after', m.raw.ttl_s ? sec(m.raw.ttl_s) : ''], ['sleeps after', m.raw.sleep_after_s ? sec(m.raw.sleep_after_s) : ''],
    ['aliases', m.aliases.join(', ')], ['port', instance?.port], ['pid', instance?.pid]];
  return h('p', {class: 'facts'}, list.filter(([, value]) => value !== '' && value != null).map(([name, value]) => h('span', {key: name}, `${name} `, h('b', {}, value))),
    m.raw.description ? h('span', {key: 'description'}, m.raw.description) : null);
}

function starts(m, more) {
  const told = [more?.starts, more?.last_starts].find(Array.isArray); // `starts` of the state is their number
  const list = (told || []).slice(0, 8);
  const rows = list.map(one => ({...one, parts: PHASE_KEYS.map(name => one.phases?.[name] || 0)}));
  const scale = Math.max(0.001, ...rows.map(one => sum(one.parts)));
  return h('section', {key: 'starts'}, h('h2', {}, 'Last starts'), rows.length ? [legend(PHASES, 'ph'), h('div', {class: 'starts'}, rows.map(one => [
    h('span', {class: 'mut'}, `${moment(one.at, serverNow())} ${one.kind || ''}`), stack(one.parts, scale, 'ph', PHASES), h('b', {class: 'n'}, sec(sum(one.parts)))]))]
    : told ? h('p', {class: 'mut'}, 'It has not been started yet.')
      : [unavailable('Phases are not available yet.', 'What is known are the costs below.'), costs(m)]);
}

/** What each way back costs, as learned so far. */
function costs(m) {
  const list = [['cold start', m.cold_s], ...(m.raw.sleep?.costs || []).map(one => [`wake from level ${one.level}`, one.wake_s])].filter(([, value]) => value != null);
  const scale = Math.max(0.001, ...list.map(([, value]) => value));
  return h('div', {class: 'starts'}, list.map(([name, value]) => [h('span', {class: 'mut'}, name), meter(value / scale, null, `${name} ${sec(value)}`), h('b', {class: 'n'}, sec(value))]));
}

function footprint(m, more) {
  if (m.absent) return h('section', {key: 'footprint'}, h('h2', {}, 'Footprint'), h('p', {class: 'mut'}, 'Its files tell what it needs, once they are here.'));
  const told = more?.footprint;
  const held = m.state === 'asleep' ? m.need_mib : m.instances[0]?.reserved_mib ?? m.need_mib;
  const list = told ? FOOTPRINTS.filter(([key]) => told[key] != null).map(([key, text, cls]) => [key === 'measured' && told.n ? `${text}, ${many(told.n, 'start')}` : text, told[key], cls, told.used === key])
    : [['reserved for the next start', m.need_mib, 'q0', true], ['measured now', m.state === 'asleep' ? null : m.instances[0]?.measured_mib, 'q3', false]].filter(([, value]) => value != null);
  const most = Math.max(held || 0, ...list.map(([, value]) => value)) * 1.1 || 1;
  return h('section', {key: 'footprint'}, h('h2', {}, 'Footprint'), list.length ? h('div', {class: 'starts'}, list.map(([name, value, cls, isUsed]) => [
    h('span', {class: isUsed ? '' : 'mut'}, name), meter(value / most, held ? held / most : null, `${name} ${gib(value)} GiB`, cls), h('span', {class: 'n'}, h('b', {}, gib(value)), ' GiB', isUsed && told ? h('small', {}, ' used') : null)]))
    : h('p', {class: 'mut'}, 'Nothing is known of its size yet: the first start books the whole device.'),
  h('p', {class: 'mut hint'}, told ? 'The tick marks the reservation. Measured wins over declared: upward at once, downward once it has been stable.'
    : `Where the figure comes from: ${m.raw.need_source || 'not told'}${more?.estimate ? `; estimate: ${more.estimate}` : ''}.`));
}
