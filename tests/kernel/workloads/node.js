// What an honest Node agent does with the standard library: the profile `node` must let all of it pass.
//
// It is run inside gVisor with and without the filter. Each step prints its name when it is done; the last line is
// `done`. It needs /tmp and a line on stdin.
'use strict';
const assert = require('node:assert');
const crypto = require('node:crypto');
const fs = require('node:fs');
const os = require('node:os');
const path = require('node:path');
const readline = require('node:readline');
const util = require('node:util');
const v8 = require('node:v8');
const vm = require('node:vm');
const zlib = require('node:zlib');
const { pipeline } = require('node:stream/promises');
const { Worker } = require('node:worker_threads');

const scratch = fs.mkdtempSync('/tmp/workload-');
const at = (name) => path.join(scratch, name);

const steps = {
  async files() {
    fs.writeFileSync(at('a'), 'x'.repeat(100000));
    await fs.promises.appendFile(at('a'), 'y');
    fs.renameSync(at('a'), at('b'));
    fs.mkdirSync(at('d/e'), { recursive: true });
    fs.symlinkSync('b', at('s'));
    fs.linkSync(at('b'), at('l'));
    assert.equal(fs.readlinkSync(at('s')), 'b');
    fs.lstatSync(at('s'));
    fs.chmodSync(at('b'), 0o600);
    fs.utimesSync(at('b'), 1, 1);
    fs.truncateSync(at('b'), 10);
    fs.copyFileSync(at('b'), at('c'));
    fs.cpSync(scratch, scratch + '2', { recursive: true });
    fs.accessSync(scratch);
    fs.realpathSync(at('s'));
    fs.realpathSync.native(at('s'));
    fs.statfsSync(scratch);
    fs.chownSync(at('b'), process.getuid(), process.getgid());
    const file = await fs.promises.open(at('m'), 'w+');
    await file.write('abc');
    await file.writev([Buffer.from('a'), Buffer.from('b')]);
    await file.readv([Buffer.alloc(2)], 0);
    await file.sync();
    await file.datasync();
    await file.truncate(4);
    await file.chmod(0o600);
    await file.close();
    await pipeline(fs.createReadStream(at('b')), zlib.createGzip(), fs.createWriteStream(at('z')));
    for await (const entry of await fs.promises.opendir(scratch)) assert(entry.name);
    for await (const line of readline.createInterface({ input: fs.createReadStream(at('b')) })) assert(line);
    fs.unlinkSync(at('l'));
    fs.rmdirSync(at('d/e'));
    fs.rmSync(scratch + '2', { recursive: true });
  },
  archives() {
    const data = crypto.randomBytes(1 << 18);
    assert(zlib.gunzipSync(zlib.gzipSync(data)).equals(data));
    assert(zlib.brotliDecompressSync(zlib.brotliCompressSync(data)).equals(data));
  },
  async digests() {
    for (const name of ['sha256', 'sha512', 'md5']) crypto.createHash(name).update('x').digest();
    crypto.scryptSync('p', 's', 32);
    await util.promisify(crypto.pbkdf2)('p', 's', 1000, 32, 'sha256');
    await util.promisify(crypto.generateKeyPair)('ed25519');
    await crypto.webcrypto.subtle.digest('SHA-256', Buffer.from('x'));
    crypto.randomUUID();
  },
  workers: () => new Promise((resolve, reject) => {
    const body = "require('node:worker_threads').parentPort.postMessage(6 * 7)";
    const worker = new Worker(body, { eval: true });
    let answer;
    worker.on('message', (message) => { answer = message; });
    worker.on('error', reject);
    worker.on('exit', () => (answer === 42 ? resolve() : reject(new Error(`answer ${answer}`))));
  }),
  atomics() {
    assert.equal(Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 10), 'timed-out');
  },
  timers: () => new Promise((resolve) => setTimeout(() => setImmediate(resolve), 20)),
  signals: () => new Promise((resolve) => {
    const alive = setInterval(() => {}, 50);
    process.once('SIGUSR2', () => { clearInterval(alive); resolve(); });
    process.kill(process.pid, 'SIGUSR2');
  }),
  facts() {
    for (const ask of ['cpus', 'freemem', 'totalmem', 'loadavg', 'uptime', 'hostname', 'version']) os[ask]();
    for (const ask of ['memoryUsage', 'cpuUsage', 'resourceUsage', 'umask', 'cwd', 'getgroups']) process[ask]();
    process.chdir('/tmp');
    process.title = 'workload';
    os.getPriority();
  },
  async wasm() {
    await WebAssembly.instantiate(Uint8Array.from([0, 97, 115, 109, 1, 0, 0, 0]));
  },
  memory() {
    let blocks = [];
    for (let i = 0; i < 64; i++) blocks.push(Buffer.alloc(1 << 20, 1));
    blocks = [];
    for (let i = 0; i < 3e5; i++) blocks.push({ i, s: 'x' + i });
    v8.getHeapStatistics();
    assert.equal(vm.runInNewContext('1 + 1'), 2);
    new Intl.DateTimeFormat('de').format(new Date());
    structuredClone({ a: 1 });
  },
  async modules() {
    await import('node:fs/promises');
  },
  async stdin() {
    const chunks = [];
    for await (const chunk of process.stdin) chunks.push(chunk);
    assert(Buffer.concat(chunks).length > 0);
  },
};

(async () => {
  for (const [name, step] of Object.entries(steps)) {
    await step();
    console.log(name);
  }
  fs.rmSync(scratch, { recursive: true });
  console.log('done');
})();
