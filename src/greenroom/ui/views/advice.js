/* Advice: what costs most, what would help, and where each figure comes from. Too little seen is said, not drawn. */

import {jsonOrNull} from '../api.js';
import {copy} from '../copy.js';
import {h} from '../paint.js';
import {cell, head, meter, nameOf, unavailable} from '../parts.js';
import {put, serverNow, store} from '../store.js';
import {gib, moment, percent, sec, sum} from '../words.js';
import {gaps} from './gaps.js';

const AGAIN_MS = 15_000;
const SEEN_MIN = 10; // fewer gaps or swaps are no ground for advice

let now = {told: undefined, at: -AGAIN_MS, isReading: false, problem: ''};

async function ensure() {
  if (now.isReading || performance.now() - now.at < AGAIN_MS || store.link !== 'live') return;
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

export function advice() {
  ensure();
  const {told} = now;
  return h('div', {class: 'pad'}, h('h1', {}, 'Advice'), h('p', {class: 'mut'}, 'Each figure comes from what this server has seen and, where it says so, from replaying that through the scheduler.'),
    now.problem ? h('p', {class: 'bad said'}, now.problem) : null,
    told === undefined ? h('p', {class: 'mut'}, now.problem ? '' : 'Reading…')
      : told === null ? unavailable('Not available yet.', 'This server does not work out advice; a newer one tells here which models take turns, how long to keep idle ones, and when a device is outgrown.')
        : sections(told));
}

function sections(told) {
  const thrash = told.thrash || [];
  const ttl = told.ttl || [];
  const cards = [told.outgrown && told.outgrown.verdict === true ? outgrown(told.outgrown) : null, thrash.map(turns), ttl.map(keep), told.outgrown ? size(told.outgrown) : null];
  const nothing = !thrash.length && !ttl.length && !told.outgrown;
  return nothing ? h('div', {class: 'calm'}, h('h2', {}, 'Nothing to change'), h('p', {class: 'mut'}, told.seen ? String(told.seen) : 'No models take turns, and no idle time is worth another setting. This page looks again by itself.')) : cards;
}

const card = (key, title, small, ...columns) => h('section', {key, class: `tip-card${columns.length > 1 ? ' pair' : ''}`}, h('div', {}, h('b', {}, title), small ? h('p', {class: 'mut'}, small) : null), columns);

function outgrown(told) {
  return card('outgrown', 'Outgrown', '', h('div', {}, h('h2', {}, told.title || 'These models have outgrown the memory'), told.text ? h('p', {}, told.text) : null,
    told.fixes?.length ? fixes(told.fixes) : null));
}

// ---- two models that take turns

function turns(one) {
  const pair = one.pair || [];
  const lost = (one.switching_s_h || 0) + (one.draining_s_h || 0);
  const figures = [[one.swaps_h == null ? null : Math.round(one.swaps_h), 'swaps an hour'], [lost ? sec(lost) : null, 'lost each hour'],
    [one.slow == null ? null : `${one.slow} of ${one.slow_total}`, 'slow requests came after the other'], [one.short_mib ? `${gib(one.short_mib)} GiB` : null, 'missing to hold both']];
  const best = (one.fixes || []).find(each => each.suggested) || (one.fixes || [])[0];
  return card(`thrash\n${pair.join('\n')}`, 'Thrash', one.since ? `since ${moment(one.since, serverNow())}` : '',
    h('div', {}, h('h2', {}, pair.map((id, i) => [i ? ' and ' : '', nameOf(id, '')]), ' take turns', one.device ? ` on ${one.device}` : ''),
      h('div', {class: 'cost'}, figures.filter(([value]) => value != null).map(([value, text]) => h('div', {}, h('b', {}, value), h('small', {}, text)))), fixes(one.fixes || [])),
    best?.diff ? change(best) : h('div', {}));
}

const fixes = list => h('div', {class: 'fix'}, list.map(one => [
  one.suggested ? h('b', {}, one.text) : h('span', {}, one.text), h('span', {class: 'mut'}, one.effect || ''), h('span', {class: 'n'}, one.swaps_h == null ? '' : `${Math.round(one.swaps_h)} swaps/h`),
  h('b', {class: 'ok'}, one.suggested ? 'suggested' : '')]));

function change(fix) {
  const lines = String(fix.diff).split('\n');
  const kind = line => (line.startsWith('+') ? 'add' : line.startsWith('-') ? 'del' : '');
  return h('div', {}, h('p', {class: 'mut'}, `The suggested change: ${fix.text}`), h('div', {class: 'diff', tabindex: '0', role: 'group', 'aria-label': 'Change of the configuration'}, lines.map((line, i) => h('div', {key: i, class: kind(line)}, line || ' '))),
    fix.note ? h('p', {class: 'mut'}, fix.note) : null, h('button', {type: 'button', onclick: event => copy(fix.diff, event.target)}, 'Copy change'));
}

// ---- how long an idle model stays

function keep(one) {
  const seen = sum((one.bins || []).map(bin => bin.n));
  const enough = seen >= SEEN_MIN;
  const title = !enough ? [nameOf(one.model, ''), ': not enough seen yet'] : one.suggested_s == null ? [nameOf(one.model, ''), ' may stay as it is']
    : ['Keep ', nameOf(one.model, ''), ` ${sec(one.suggested_s)} after its last request, then stop it`];
  return card(`ttl\n${one.model}`, 'TTL', one.model, h('div', {}, h('h2', {}, title), one.text ? h('p', {}, one.text) : null,
    enough ? table(one.table) : h('p', {class: 'mut'}, `${seen} gaps between requests were seen; ${SEEN_MIN} are needed before one can say anything.`)),
  enough && one.bins?.length ? gaps(one) : h('div', {}));
}

function table(rows) {
  if (!Array.isArray(rows) || !rows.length) return null;
  const name = one => one.name ?? (one.ttl_s == null ? one.ttl : sec(one.ttl_s));
  return h('table', {class: 'narrow'}, head([['ttl'], ['cold starts a day', 'n'], ['GiB-hours a day', 'n'], ['remark', '', true]]), h('tbody', {}, rows.map((one, i) =>
    h('tr', {key: i}, cell(one.suggested ? h('b', {}, name(one)) : name(one)), cell(one.cold_starts_day ?? one.cold_starts, 'n'), cell(one.gib_h_day ?? one.gib_hours, 'n'), cell(one.suggested ? 'suggested' : one.remark || '', one.suggested ? 'ok' : 'mut')))));
}

// ---- the size of the machine

function size(told) {
  const title = told.verdict === true ? 'What was measured' : typeof told.verdict === 'string' ? told.verdict : 'Not outgrown: tune first';
  return card('size', 'Size', '', h('div', {}, h('h2', {}, title), h('div', {class: 'fix three'}, (told.measures || []).map(one => [h('span', {}, one.name),
    meter(one.value, one.limit, `${percent(one.value)}, limit ${percent(one.limit)}`, one.value > one.limit ? 'q1' : 'q3'), h('span', {class: 'n'}, h('b', {}, percent(one.value)), h('small', {}, ` of ${percent(one.limit)}`))]))));
}
