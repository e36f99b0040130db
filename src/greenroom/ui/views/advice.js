/* Advice: what costs most, what would help, and where each figure comes from. Too little seen is said, not drawn. */

import {jsonOrNull} from '../api.js';
import {copy} from '../copy.js';
import {h} from '../paint.js';
import {cell, head, meter, nameOf, unavailable} from '../parts.js';
import {put, serverNow, store} from '../store.js';
import {gib, many, moment, percent, sec, sum} from '../words.js';
import {gaps} from './gaps.js';

const AGAIN_MS = 15_000;
const COMPUTING_MS = 2000;
const FEW_MAX = 12;
const SEEN_MIN = 10; // fewer gaps or swaps are no ground for advice

let now = {told: undefined, at: -AGAIN_MS, isReading: false, problem: ''};

async function ensure() {
  if (now.isReading || performance.now() - now.at < (now.told?.is_computing ? COMPUTING_MS : AGAIN_MS) || store.link !== 'live') return;
  now = {...now, isReading: true, at: performance.now()};
  try {
    now.told = await jsonOrNull('api/advice');
    now.problem = '';
  } catch (error) {
    now.problem = error.message;
  }
  now.isReading = false;
  put();
}

export function advice(picture) {
  ensure();
  const {told} = now;
  return h('div', {class: 'pad'}, h('h1', {}, 'Advice'), h('p', {class: 'mut'}, `Each figure comes from what this server has seen, or from replaying that through the scheduler.${ground(told)}`),
    now.problem ? h('p', {class: 'bad said'}, now.problem) : null,
    told === undefined ? h('p', {class: 'mut'}, now.problem ? '' : 'Reading…')
      : told === null ? unavailable('Not available yet.', 'This server does not work out advice; a newer one tells here which models take turns, how long to keep idle ones, and when a device is outgrown.')
        : sections(told, picture));
}

function sections(told, picture) {
  const thrash = told.thrash || [];
  const unsaid = picture.thrash.filter(now => !thrash.some(one => now.models.every(id => one.pair?.includes(id))));
  const ttl = told.ttl || [];
  const judged = ttl.filter(isEnough);
  const isOutgrown = told.outgrown && ['outgrown', 'capacity', true].includes(told.outgrown.verdict);
  const changes = judged.filter(isChange);
  if (!thrash.length && !ttl.length && !told.outgrown && !unsaid.length) return told.is_computing ? calm('Being worked out…', 'The requests of the last hours are replayed in a process of its own, at the lowest priority.')
    : calm('Nothing has been seen yet', told.why_not || 'Advice comes from the requests of the last hours; this page looks again by itself.');
  return [
    unsaid.map(happening),
    thrash.length || isOutgrown || changes.length || unsaid.length ? null
      : told.outgrown?.verdict === 'unknown' ? calm('Nothing to change so far', 'No models take turns and no idle time is worth another setting. Whether a device is outgrown can be said after an hour.')
        : calm('Nothing to change', 'No models take turns, no device is outgrown, and no idle time is worth another setting.'),
    isOutgrown ? outgrown(told.outgrown) : null, thrash.map(one => turns(one, told.seen)), [...changes, ...judged.filter(one => !isChange(one))].map(one => keep(one, told.seen)),
    told.outgrown?.measures?.length ? size(told.outgrown) : null, tooFew(ttl.filter(one => !isEnough(one)))];
}

const seenOf = one => one.gaps ?? sum((one.bins || []).map(bin => bin.n));
const isEnough = one => (one.enough ?? seenOf(one) >= SEEN_MIN) && seenOf(one) >= SEEN_MIN;
/** A command that tries the same, for a shell; the user puts other values in. */
export function replayOf(changes, seen) {
  const hours = Math.max(1, Math.ceil(seen?.from ? (serverNow() - seen.from) / 3600 - 0.05 : 1));
  return `greenroom replay --since ${hours}h ${changes.map(one => `--set ${quoted(one)}`).join(' ')}`;
}

const quoted = text => (/^[A-Za-z0-9_.,:=@%+/-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

const tryIt = (changes, seen) => (changes?.length ? h('div', {class: 'try'}, h('p', {class: 'mut'}, 'Replay it with other values, nothing is started for that:'),
  h('pre', {tabindex: '0'}, replayOf(changes, seen)), h('button', {type: 'button', onclick: event => copy(replayOf(changes, seen), event.target)}, 'Copy command')) : null);

const isChange = one => one.matters ?? (one.suggested_s != null && one.suggested_s !== one.now_s && !one.now_auto);
const calm = (title, text) => h('div', {class: 'calm'}, h('h2', {}, title), h('p', {class: 'mut'}, text));

/** What the figures rest on. */
function ground(told) {
  const seen = told?.seen;
  if (!seen || typeof seen !== 'object') return '';
  const counted = seen.requests == null ? '' : `, ${many(seen.requests, 'request')}`;
  return ` Seen: ${sec(seen.to - seen.from)} up to ${moment(seen.to, serverNow())}${counted}.${told.replayed ? ' Each way out was replayed on them.' : ''}${told.is_computing ? ' Newer advice is being worked out.' : ''}`;
}

const card = (key, title, small, ...columns) => h('section', {key, class: `tip-card${columns.length > 1 ? ' pair' : ''}`}, h('div', {}, h('b', {}, title), small ? h('p', {class: 'mut'}, small) : null), columns);

function outgrown(told) {
  const title = told.verdict === 'capacity' ? 'More slots are needed, not more places' : `${told.device || 'The memory'} has outgrown one card`;
  return card('outgrown', told.verdict === 'capacity' ? 'Slots' : 'Outgrown', '', h('div', {}, h('h2', {}, title), told.text ? h('p', {}, `${told.text}.`) : null,
    told.next_step ? h('p', {}, h('b', {}, 'What to do: '), told.next_step, '.') : null));
}

// ---- two models that take turns

/** As the scheduler sees it happen; the advice of the planner comes a little later. */
function happening(one) {
  return card(`now\n${one.models.join('\n')}`, 'Now', `for ${sec(one.since_s)}`, h('div', {}, h('h2', {}, one.models.map((id, i) => [i ? ' and ' : '', nameOf(id, '')]), ` take turns on ${one.device}`),
    h('p', {}, `${many(one.swaps, 'swap')} took ${sec(one.moving_s)}, ${percent(one.share)} of the time.`), h('p', {class: 'mut'}, 'What would end it is worked out from the requests of the last hours, a minute or two later.')));
}

function turns(one, seen) {
  const pair = one.pair || [];
  const isRate = one.swaps_h != null; // else too short a time was seen for figures per hour
  const lost = isRate ? (one.switching_s_h || 0) + (one.draining_s_h || 0) : (one.switching_s || 0) + (one.draining_s || 0);
  const swaps = isRate ? Math.round(one.swaps_h) : one.swaps;
  const figures = [[swaps, isRate ? 'swaps an hour' : `swaps in ${sec(one.seconds)}`], [lost ? sec(lost) : null, isRate ? 'lost each hour' : 'lost in that time'],
    [one.slow == null ? null : `${one.slow} of ${one.slow_total}`, 'slow requests came after the other'], [one.short_mib ? `${gib(one.short_mib)} GiB` : null, 'missing to hold both']];
  const best = (one.fixes || []).find(each => each.suggested) || (one.fixes || [])[0];
  return card(`thrash\n${pair.join('\n')}`, 'Thrash', one.since ? `since ${moment(one.since, serverNow())}` : '',
    h('div', {}, h('h2', {}, pair.map((id, i) => [i ? ' and ' : '', nameOf(id, '')]), ' take turns', one.device ? ` on ${one.device}` : ''),
      h('div', {class: 'cost'}, figures.filter(([value]) => value != null).map(([value, text]) => h('div', {}, h('b', {}, value), h('small', {}, text)))), fixes(one.fixes || [])),
    best?.diff?.length || best?.changes?.length ? change(best, seen) : h('div', {}));
}

const fixes = list => h('div', {class: 'fix'}, list.map(one => [
  one.suggested ? h('b', {}, one.text) : h('span', {}, one.text), h('span', {class: 'mut'}, one.effect || ''), h('span', {class: 'n'}, one.swaps_h != null ? `${Math.round(one.swaps_h)} swaps/h` : one.swaps != null ? many(one.swaps, 'swap') : ''),
  h('b', {class: 'ok'}, one.suggested ? 'suggested' : '')]));

function change(fix, seen) {
  const lines = Array.isArray(fix.diff) ? fix.diff : String(fix.diff || '').split('\n');
  const kind = line => (line.startsWith('+') ? 'add' : line.startsWith('-') ? 'del' : '');
  return h('div', {}, h('p', {class: 'mut'}, `The suggested change: ${fix.text}`), h('div', {class: 'diff', tabindex: '0', role: 'group', 'aria-label': 'Change of the configuration'}, lines.map((line, i) => h('div', {key: i, class: kind(line)}, line || ' '))),
    fix.note ? h('p', {class: 'mut'}, fix.note) : null, h('button', {type: 'button', onclick: event => copy(lines.join('\n'), event.target)}, 'Copy change'), tryIt(fix.changes, seen));
}

// ---- how long an idle model stays

function keep(one, seen) {
  const title = isChange(one) ? ['Keep ', nameOf(one.model, ''), ` ${sec(one.suggested_s)} after its last request, then stop it`] : [nameOf(one.model, ''), ' may stay as it is'];
  return card(`ttl\n${one.model}`, 'TTL', one.model, h('div', {}, h('h2', {}, title), one.why || one.text ? h('p', {}, one.why || one.text) : null, table(one), isChange(one) ? tryIt([`models.${one.model}.ttl=${Math.round(one.suggested_s)}s`], seen) : null),
    one.bins?.length ? gaps(one) : h('div', {}));
}

function tooFew(list) {
  if (!list.length) return null;
  return card('few', 'Not enough seen', '', h('div', {}, h('p', {class: 'mut'}, `${SEEN_MIN} gaps between requests are needed before anything can be said of an idle time. So far: `,
    list.slice(0, FEW_MAX).map((one, i) => [i ? ', ' : '', nameOf(one.model, ''), ` ${seenOf(one)}`]), list.length > FEW_MAX ? ` and ${list.length - FEW_MAX} more models` : '', '.')));
}

function table(advised) {
  const rows = advised.table || [];
  if (!rows.length) return null;
  const isBest = one => one.suggested ?? (one.ttl_s != null && one.ttl_s === advised.suggested_s);
  const isNow = one => one.ttl_s === advised.now_s;
  const name = one => `${one.ttl ?? (one.ttl_s == null ? 'never' : sec(one.ttl_s))}${isNow(one) && !String(one.ttl).includes('now') ? ' (now)' : ''}`;
  return h('table', {class: 'narrow'}, head([['ttl'], ['cold starts a day', 'n'], ['GiB-hours a day', 'n'], ['remark', 'gap', true]]), h('tbody', {}, rows.map((one, i) =>
    h('tr', {key: i}, cell(isBest(one) ? h('b', {}, name(one)) : name(one)), cell(one.cold_starts_day, 'n'), cell(one.gib_hours_day, 'n'), cell(one.remark || (isBest(one) ? 'suggested' : ''), isBest(one) ? 'gap ok' : 'gap mut')))));
}

// ---- the size of the machine

function size(told) {
  const title = {outgrown: 'What was measured', capacity: 'What was measured', fits: 'Everybody has room', unknown: 'Too early to say'}[told.verdict] || 'Not outgrown: tune first';
  return card('size', 'Size', '', h('div', {}, h('h2', {}, title), told.text && told.verdict !== 'outgrown' && told.verdict !== 'capacity' ? h('p', {class: 'mut'}, `${told.text}.`) : null, h('div', {class: 'fix three'}, (told.measures || []).map(one => [h('span', {}, one.name),
    meter(one.value, one.limit, `${percent(one.value)}, limit ${percent(one.limit)}`, one.value > one.limit ? 'q1' : 'q3'), h('span', {class: 'n'}, h('b', {}, percent(one.value)), h('small', {}, ` of ${percent(one.limit)}`))]))));
}
