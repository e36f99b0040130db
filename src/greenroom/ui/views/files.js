/* A model whose files are not on this host yet: how far its fetch is, what it waits for, who waits for it. */

import {h} from '../paint.js';
import {glyph, nameOf} from '../parts.js';
import {about, bytes, many, percent, sec} from '../words.js';

const STAGES = {queued: 'waits for its turn', resolving: 'being looked up', fetching: 'fetching', retrying: 'being asked for again', verifying: 'being checked', publishing: 'being put in place', done: 'arrived'};

export const stageOf = fetch => STAGES[fetch.stage] || fetch.stage;
const waitersOf = fetch => (fetch.waiting ? `${fetch.waiting} ${fetch.waiting === 1 ? 'waits' : 'wait'}` : '');
const leftOf = fetch => (fetch.eta_s == null ? '' : about(Math.max(1, Math.round(fetch.eta_s))));

/** `fetching 34 %, ≈ 12 s, 3 wait`; `not here yet`. */
export function arrival(m) {
  if (!m.fetch) return 'not here yet';
  const share = m.fetch.share == null ? '' : ` ${percent(m.fetch.share)}`;
  return [`${stageOf(m.fetch)}${share}`, leftOf(m.fetch), waitersOf(m.fetch)].filter(Boolean).join(', ');
}

/** What a model's page shows in place of what only models that are here have. */
export function files(m, fault) {
  if (!m.absent) return null;
  return h('section', {key: 'files', class: 'files'}, h('h2', {}, 'Files'), m.fetch ? underWay(m.fetch) : [
    fault ? h('p', {class: 'warn wrap'}, fault) : null,
    h('p', {}, 'They are not on this host yet. The first request fetches them and waits; “Fetch now” does it before anybody asks. Memory is booked once they are here.')]);
}

function underWay(fetch) {
  const share = fetch.share ?? 0;
  const told = fetch.share == null ? stageOf(fetch) : `${stageOf(fetch)}, ${percent(fetch.share)}`;
  const figures = [
    fetch.share == null ? '' : h('b', {}, percent(fetch.share)), stageOf(fetch), fetch.total_bytes ? `${bytes(fetch.done_bytes)} of ${bytes(fetch.total_bytes)}` : '',
    fetch.bytes_per_s ? `${bytes(fetch.bytes_per_s)}/s` : '', fetch.eta_s == null ? '' : `${leftOf(fetch)} left`, fetch.since_s == null ? '' : `since ${sec(fetch.since_s)}`,
    fetch.waiting ? h('b', {}, `${many(fetch.waiting, 'request')} ${fetch.waiting === 1 ? 'waits' : 'wait'} for it`) : 'nobody waits for it'];
  return [
    h('div', {class: 'meter long', role: 'progressbar', 'aria-label': 'Fetch', 'aria-valuemin': '0', 'aria-valuemax': '100',
      'aria-valuenow': fetch.share == null ? null : String(Math.floor(share * 100)), 'aria-valuetext': told}, h('i', {style: {width: `${(share * 100).toFixed(2)}%`}})),
    h('p', {class: 'facts'}, figures.filter(Boolean).map((one, i) => h('span', {key: i}, one)))];
}

function said(fetch) {
  if (fetch.stage === 'queued') return 'Its files are not here; their fetch waits for its turn';
  const share = fetch.share == null ? '' : `, ${percent(fetch.share)}`;
  return `Its files are ${fetch.stage === 'fetching' ? 'being fetched' : stageOf(fetch)}${share}`;
}

/** Those who wait for files, beside those who wait for memory. */
export function entry(m) {
  return h('div', {class: 'wait', key: `${m.id}\nfiles`, 'data-m': m.id},
    h('h3', {class: 's-fetching'}, glyph('fetching'), nameOf(m.id), h('em', {}, leftOf(m.fetch))),
    h('p', {}, `${m.fetch.waiting} waiting. ${said(m.fetch)}.`));
}
