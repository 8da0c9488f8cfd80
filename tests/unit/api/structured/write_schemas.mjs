// Writes written_schemas.json beside this file: JSON schemas by zod, and those of the tools of MCP servers.
//
//     node write_schemas.mjs [zod] [mcp] [--print]
//
// The packages come from npm, in the versions below, into a directory that is removed at the end. Without a name both
// parts are written. --print writes to the standard output instead.

import { execFileSync, spawn } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const ZOD = "zod@4.6.7";
const SERVERS = {
  "@modelcontextprotocol/server-filesystem@2026.8.31": ["mcp-server-filesystem", "."],
  "@modelcontextprotocol/server-memory@2026.8.31": ["mcp-server-memory"],
  "@modelcontextprotocol/server-everything@2026.8.31": ["mcp-server-everything"],
  "@modelcontextprotocol/server-sequential-thinking@2026.8.31": ["mcp-server-sequential-thinking"],
  "@modelcontextprotocol/server-github@2025.4.8": ["mcp-server-github"],
  "@playwright/mcp@0.0.83": ["playwright-mcp"],
  "@upstash/context7-mcp@4.1.1": ["context7-mcp"],
};
const ANSWER_MS = 30000;
const TARGET = join(dirname(fileURLToPath(import.meta.url)), "written_schemas.json");

function byZod(z) {
  const person = z.object({ name: z.string().min(1), age: z.int().min(0).max(150) });
  const address = z.object({ street: z.string(), zip: z.string().regex(/^\d{5}$/) });
  const color = z.enum(["red", "green", "blue"]);
  const search = z.object({ type: z.literal("search"), query: z.string() });
  const open = z.object({ type: z.literal("open"), url: z.url() });
  const tree = z.object({
    value: z.number(),
    get children() {
      return z.array(tree);
    },
  });
  const json = z.lazy(() => z.union([z.string(), z.number(), z.boolean(), z.null(), z.array(json), z.record(z.string(), json)]));
  const list = z.object({ value: z.string(), next: z.lazy(() => list).nullable() });
  return {
    person,
    "empty object": z.object({}),
    "strict object": z.strictObject({ name: z.string() }),
    "loose object": z.looseObject({ name: z.string() }),
    catchall: z.object({ name: z.string() }).catchall(z.number()),
    optional: z.object({ name: z.string().optional(), age: z.number().optional() }),
    nullable: z.object({ name: z.string().nullable(), person: person.nullable() }),
    nullish: z.object({ name: z.string().nullish() }),
    default: z.object({ limit: z.int().min(1).max(100).default(10), order: z.enum(["asc", "desc"]).default("asc") }),
    prefault: z.object({ limit: z.number().prefault(10) }),
    catch: z.object({ limit: z.number().catch(10) }),
    describe: z.object({ city: z.string().describe("City and country") }).describe("Where"),
    meta: z.object({ city: z.string().meta({ title: "City", examples: ["Paris"], deprecated: true }) }).meta({ id: "Place" }),
    nested: z.object({ person, address, also: z.array(address).max(2) }),
    partial: person.extend({ address }).partial(),
    pick: person.pick({ name: true }),
    extend: person.extend({ email: z.email() }),
    "object in strict objects": z.strictObject({ inner: z.strictObject({ value: z.number() }).optional() }),

    email: z.object({ to: z.email() }),
    "email of HTML": z.object({ to: z.email({ pattern: z.regexes.html5Email }) }),
    uuid: z.object({ id: z.uuid() }),
    uuidv4: z.object({ id: z.uuidv4() }),
    guid: z.object({ id: z.guid() }),
    url: z.object({ url: z.url() }),
    "http url": z.object({ url: z.httpUrl() }),
    "url with a protocol": z.object({ url: z.url({ protocol: /^https?$/, hostname: z.regexes.domain }) }),
    "iso date": z.object({ day: z.iso.date() }),
    "iso time": z.object({ time: z.iso.time() }),
    "iso datetime": z.object({ at: z.iso.datetime() }),
    "iso datetime with offset": z.object({ at: z.iso.datetime({ offset: true, precision: 3 }) }),
    "iso local datetime": z.object({ at: z.iso.datetime({ local: true }) }),
    "iso duration": z.object({ span: z.iso.duration() }),
    ipv4: z.object({ host: z.ipv4() }),
    ipv6: z.object({ host: z.ipv6() }),
    cidrv4: z.object({ net: z.cidrv4() }),
    cidrv6: z.object({ net: z.cidrv6() }),
    base64: z.object({ data: z.base64() }),
    base64url: z.object({ data: z.base64url() }),
    hex: z.object({ data: z.hex() }),
    e164: z.object({ phone: z.e164() }),
    nanoid: z.object({ id: z.nanoid() }),
    cuid: z.object({ id: z.cuid() }),
    cuid2: z.object({ id: z.cuid2() }),
    ulid: z.object({ id: z.ulid() }),
    xid: z.object({ id: z.xid() }),
    ksuid: z.object({ id: z.ksuid() }),
    jwt: z.object({ token: z.jwt() }),
    emoji: z.object({ mood: z.emoji() }),
    hostname: z.object({ host: z.hostname() }),

    "lengths of texts": z.object({ code: z.string().min(2).max(4), pin: z.string().length(4), name: z.string().nonempty() }),
    regex: z.object({ sku: z.string().regex(/^[A-Z]{2}-\d{4}$/), tag: z.string().regex(/[a-z]/) }),
    "regex with flags": z.object({ word: z.string().regex(/^yes|no$/i) }),
    "several patterns": z.object({ word: z.string().regex(/^[a-z]+$/).regex(/x/) }),
    "ends of texts": z.object({ a: z.string().startsWith("a-"), b: z.string().endsWith(".md"), c: z.string().includes("x") }),
    "case of texts": z.object({ low: z.string().lowercase(), high: z.string().uppercase(), trimmed: z.string().trim() }),
    "pattern and length": z.object({ name: z.string().regex(/^[a-z0-9-]+$/).min(3).max(8) }),
    "template literal": z.object({ size: z.templateLiteral([z.number(), z.enum(["px", "em", "%"])]) }),
    "template of a text": z.object({ at: z.templateLiteral(["user-", z.string()]) }),

    int: z.object({ any: z.int(), byte: z.int().min(0).max(255), small: z.int32(), unsigned: z.uint32() }),
    "positive and negative": z.object({ a: z.number().positive(), b: z.int().negative(), c: z.number().nonnegative() }),
    "ranges of numbers": z.object({ share: z.number().min(0).max(1), open: z.number().gt(0).lt(1) }),
    multipleOf: z.object({ five: z.int().multipleOf(5).min(0).max(1000), cent: z.number().multipleOf(0.01) }),
    "floats of a width": z.object({ single: z.float32(), double: z.float64() }),
    boolean: z.object({ is_done: z.boolean(), nothing: z.null() }),
    coerced: z.object({ count: z.coerce.number().int().min(1), when: z.coerce.string() }),

    literal: z.object({ kind: z.literal("a"), one: z.literal([1, 2, "x", null]), yes: z.literal(true) }),
    enum: z.object({ color, some: color.exclude(["red"]).optional() }),
    "native enum": z.object({ level: z.enum({ Low: 1, High: 2 }), name: z.enum({ A: "a", B: 2 }) }),
    union: z.object({ value: z.union([z.string(), z.number(), z.array(z.string())]) }),
    "union of objects": z.object({ value: z.union([person, address]) }),
    discriminatedUnion: z.object({ action: z.discriminatedUnion("type", [search, open]) }),
    "discriminated union at the top": z.discriminatedUnion("type", [search, open]),
    "discriminated union of strict ones": z.object({
      action: z.discriminatedUnion("type", [
        z.strictObject({ type: z.literal("a"), n: z.int() }),
        z.strictObject({ type: z.literal(["b", "c"]), s: z.string() }),
      ]),
    }),
    xor: z.xor([z.object({ a: z.string() }), z.object({ b: z.number() })]),
    intersection: z.intersection(person, address),
    "intersection of patterns": z.intersection(z.string().regex(/^a/), z.string().max(5)),
    "intersection in an object": z.object({ both: person.and(z.object({ note: z.string().optional() })) }),

    array: z.object({ tags: z.array(z.string()).min(1).max(5), exact: z.array(z.number()).length(2) }),
    "array of arrays": z.object({ rows: z.array(z.array(z.union([z.int(), z.null()]))) }),
    "nonempty array": z.array(person).nonempty(),
    tuple: z.object({ point: z.tuple([z.number(), z.number()]) }),
    "tuple with a rest": z.object({ row: z.tuple([z.string(), z.int().optional()], z.boolean()) }),
    "set as array": z.object({ tags: z.array(z.string()).meta({ uniqueItems: true }) }),
    record: z.object({ counts: z.record(z.string(), z.int()) }),
    "record with enum keys": z.record(color, z.number()),
    partialRecord: z.object({ counts: z.partialRecord(color, z.int()) }),
    looseRecord: z.object({ counts: z.looseRecord(z.string().regex(/^n_/), z.int()) }),
    "record with pattern keys": z.object({ counts: z.record(z.string().regex(/^[a-z]{1,3}$/), z.int()) }),
    "record of objects": z.record(z.string(), z.object({ x: z.number(), y: z.number() })),

    recursion: tree,
    list,
    json: z.object({ value: json }),
    "any and unknown": z.object({ any: z.any(), unknown: z.unknown(), never: z.never().optional() }),
    "z.json": z.object({ value: z.json() }),
    readonly: z.object({ tags: z.array(z.string()).readonly() }).readonly(),
    brand: z.object({ id: z.string().brand("Id") }),
    refine: z.object({ even: z.int().refine((n) => n % 2 === 0) }),
    file: z.object({ path: z.string().regex(/^(?!.*\.\.).+$/) }),
    stringbool: z.object({ flag: z.stringbool() }),
    "pipe and transform": z.object({ count: z.string().transform(Number).pipe(z.number()) }),
  };
}

function zodLines(z) {
  const made = [];
  for (const [name, schema] of Object.entries(byZod(z))) {
    const variants = [["", { io: "input" }]];
    if (["default", "nested", "recursion", "record", "tuple with a rest"].includes(name)) {
      variants.push([", output", { io: "output" }], [", draft 7", { target: "draft-7" }]);
    }
    for (const [suffix, options] of variants) {
      made.push({ from: ZOD, name: name + suffix, schema: z.toJSONSchema(schema, options) });
    }
  }
  return made;
}

async function toolsOf(directory, name, [command, ...given]) {
  // Its environment holds nothing of ours.
  const environment = { PATH: process.env.PATH, HOME: directory };
  const path = join(directory, "node_modules", ".bin", command);
  const server = spawn(path, given, { cwd: directory, env: environment, stdio: ["pipe", "pipe", "ignore"] });
  const timer = setTimeout(() => server.kill("SIGKILL"), ANSWER_MS);
  const send = (message) => server.stdin.write(JSON.stringify({ jsonrpc: "2.0", ...message }) + "\n");
  const clientInfo = { name: "schemas", version: "1" };
  send({ id: 1, method: "initialize", params: { protocolVersion: "2025-06-18", capabilities: {}, clientInfo } });
  try {
    for await (const line of createInterface({ input: server.stdout })) {
      const message = JSON.parse(line);
      if (message.id === 1) {
        send({ method: "notifications/initialized" });
        send({ id: 2, method: "tools/list", params: {} });
      } else if (message.id === 2) {
        return message.result.tools.map((tool) => ({ from: name, name: tool.name, schema: tool.inputSchema }));
      }
    }
    throw new Error(`${name} ended without its tools`);
  } finally {
    clearTimeout(timer);
    server.kill();
  }
}

async function written(parts, directory) {
  const packages = [...(parts.zod ? [ZOD] : []), ...(parts.mcp ? Object.keys(SERVERS) : [])];
  const flags = ["install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", "--prefix", directory];
  execFileSync("npm", [...flags, ...packages], { stdio: ["ignore", "ignore", "inherit"] });
  const require = createRequire(join(directory, "package.json"));
  const lines = parts.zod ? zodLines(require("zod")) : [];
  for (const [name, command] of parts.mcp ? Object.entries(SERVERS) : []) {
    lines.push(...(await toolsOf(directory, name, command)));
  }
  return lines;
}

const chosen = process.argv.slice(2);
const isAll = !chosen.includes("zod") && !chosen.includes("mcp");
const parts = { zod: isAll || chosen.includes("zod"), mcp: isAll || chosen.includes("mcp") };
const directory = mkdtempSync(join(tmpdir(), "schemas-"));
try {
  let lines = await written(parts, directory);
  if (!isAll && !chosen.includes("--print")) {
    const isOther = (line) => (line.from === ZOD ? !parts.zod : !parts.mcp);
    lines = [...JSON.parse(readFileSync(TARGET)).filter(isOther), ...lines];
  }
  const text = `[\n${lines.map((line) => JSON.stringify(line)).join(",\n")}\n]\n`;
  if (chosen.includes("--print")) process.stdout.write(text);
  else writeFileSync(TARGET, text);
} finally {
  rmSync(directory, { recursive: true, force: true });
}
