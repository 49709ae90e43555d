// Rows of the audit log: the daemon's own, and those of the supervisor that it copied.

// The type and the fields of a row; of a copied row, those of the supervisor's row in it.
export function fields(event) {
  const { type, ...kind } = event.kind;
  if (type !== "supervisor_row") return { type, own: true, ...kind };
  try {
    return { ...JSON.parse(kind.line).kind, type: kind.row_type, own: false };
  } catch {
    return { type: kind.row_type, own: false, ...kind };
  }
}

const BAD = /denied|failed|rejected|exhausted|drift|killed|refused|mismatch/;
export const isBad = (one) => BAD.test(one.type) || ["failed", "killed", "error"].includes(one.status ?? one.state);

// The fields of a row that are not said elsewhere, as `name=value`.
export function told(one, without = []) {
  return Object.entries(one)
    .filter(([name, value]) => !["type", "own", ...without].includes(name) && value !== null && value !== "")
    .map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`)
    .join(" ");
}
