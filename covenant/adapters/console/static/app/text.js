// Texts of agents, as a person may read them: what is invisible or turns text around is written out.

const HIDDEN = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}\u{115f}\u{1160}\u{3164}\u{ffa0}\u{fe00}-\u{fe0f}\u{e0100}-\u{e01ef}]/gu;
const STACKED = /(\p{M}{2})\p{M}+/gu;
const written = (one) => `\\u{${one.codePointAt(0).toString(16)}}`;

// A text of several lines: line ends and tabs stay.
export function shown(value, most = 20000) {
  const text = typeof value === "string" ? value : JSON.stringify(value) ?? "";
  const cut = text.length > most ? `${text.slice(0, most)} ... (${text.length - most} more)` : text;
  return cut.replace(STACKED, "$1").replace(HIDDEN, (one) => (one === "\n" || one === "\t" ? one : written(one)));
}

// A text in a line of ours.
export function line(value, most = 300) {
  return shown(value, most).replace(/[\n\t]/g, (one) => (one === "\n" ? "\\n" : "\\t"));
}

export function when(ms) {
  const at = new Date(Number(ms));
  return Number.isNaN(at.getTime()) ? String(ms) : at.toISOString().slice(5, 19).replace("T", " ");
}

export function age(ms) {
  for (const [unit, size] of [["d", 86400000], ["h", 3600000], ["m", 60000], ["s", 1000]]) {
    if (ms >= size) return `${Math.floor(ms / size)}${unit}`;
  }
  return "0s";
}

export function size(bytes) {
  if (typeof bytes !== "number") return "-";
  let rest = bytes;
  for (const unit of ["B", "K", "M", "G"]) {
    if (rest < 10000) return `${rest}${unit}`;
    rest = Math.floor(rest / 1024);
  }
  return `${rest}T`;
}
