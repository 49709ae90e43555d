"use strict";

// The gate: hostile code starts under gVisor or not at all. The same signs as in ../python/gate.py, which says why each
// is one; they are read only, and every one of them must hold.

const fs = require("node:fs");
const os = require("node:os");

const UNAME_VERSION = "#1 SMP Sun Jan 10 15:06:54 PST 2016";
const LANDMARKS = ["/proc/zoneinfo", "/proc/buddyinfo", "/proc/softirqs", "/proc/self/wchan"];
const REFUSED = 78; // EX_CONFIG of sysexits.h

function there(path) {
  try {
    fs.lstatSync(path);
    return true;
  } catch (error) {
    return error.code !== "ENOENT";
  }
}

function reasonToRefuse() {
  if (os.version() !== UNAME_VERSION) return `the kernel is \`${os.release()} ${os.version()}\``;
  let version;
  try {
    version = fs.readFileSync("/proc/version", "latin1").trim();
  } catch (error) {
    return `/proc/version cannot be read: ${error.code}`;
  }
  if (version !== `Linux version ${os.release()} ${os.version()}`) return `/proc/version is \`${version}\``;
  const landmark = LANDMARKS.find(there);
  return landmark === undefined ? null : `${landmark} exists`;
}

exports.requireGvisor = () => {
  const reason = reasonToRefuse();
  if (reason !== null) {
    fs.writeSync(2, `refused: this is hostile code and runs only under gVisor, but ${reason}\n`);
    process.exit(REFUSED);
  }
};
