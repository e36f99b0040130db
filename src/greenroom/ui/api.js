/* The server, as the page sees it. Addresses are relative, so that a reverse proxy may put it under any prefix. */

const ROOT = new URL('..', document.baseURI);
let key = '';
try {
  key = sessionStorage.getItem('greenroom-key') || '';
} catch { /* storage is off: the key lives as long as the page */ }

export const hasKey = () => key !== '';

/** Takes another key, for this tab only. */
export function useKey(value) {
  key = value;
  try {
    if (value) sessionStorage.setItem('greenroom-key', value);
    else sessionStorage.removeItem('greenroom-key');
  } catch { /* as above */ }
}

export class Refusal extends Error {
  constructor(status, message, code = '') {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const path = (model, rest = '') => `api/models/${encodeURIComponent(model)}${rest}`;

// Without the browser's own credentials, else a 401 of greenroom opens the browser's password box over the page.
// Where something in front of greenroom (a proxy with a login) turns that away, they are sent along from then on.
let credentials = 'omit';

/** A request; rejects with Refusal when it is answered with an error, with TypeError when it is not answered. */
export async function call(target, options = {}) {
  const headers = {Accept: 'application/json', ...options.headers};
  if (key) headers.Authorization = `Bearer ${key}`;
  const used = credentials;
  const response = await fetch(new URL(target, ROOT), {...options, headers, credentials: used, cache: 'no-store', redirect: 'manual', referrerPolicy: 'no-referrer'});
  if (response.ok) return response;
  const refusal = await refusalOf(response);
  if (used === 'omit' && !refusal.isOurs && (response.type === 'opaqueredirect' || response.status === 401 || response.status === 403)) {
    credentials = 'same-origin';
    return call(target, options);
  }
  throw refusal;
}

async function refusalOf(response) {
  const text = await response.text().catch(() => '');
  try {
    const error = JSON.parse(text).error;
    return Object.assign(new Refusal(response.status, String(error.message), String(error.code || '')), {isOurs: true});
  } catch {
    return new Refusal(response.status, text.slice(0, 300) || `the server answered ${response.status}`);
  }
}

export async function json(target, options) {
  return (await call(target, options)).json();
}

/** The same; null where this server has no such route (yet). */
export async function jsonOrNull(target, options) {
  try {
    return await json(target, options);
  } catch (error) {
    if (error instanceof Refusal && (error.status === 404 || error.status === 405)) return null;
    throw error;
  }
}

/** The events of a stream, one object per event: {id, data, comment}. Ends when the stream does. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = '';
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      const parts = (pending + value).split(/\r?\n\r?\n/);
      pending = parts.pop();
      for (const part of parts) yield event(part);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function event(part) {
  const out = {id: null, data: '', comment: '', kind: ''};
  for (const line of part.split(/\r?\n/)) {
    const [, name, value] = /^([^:]*):? ?(.*)$/s.exec(line);
    if (name === 'data') out.data += (out.data ? '\n' : '') + value;
    else if (name === 'id') out.id = value;
    else if (name === 'event') out.kind = value;
    else if (name === '') out.comment = value;
  }
  return out;
}
