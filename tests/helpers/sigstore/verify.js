// Verifies a sigstore bundle with sigstore's own verifier: node verify.js BUNDLE PUBLIC_KEY. Prints its statement.
const { readFileSync } = require("fs");
const { createPublicKey } = require("crypto");
const { bundleFromJSON } = require("@sigstore/bundle");
const { Verifier, toSignedEntity } = require("@sigstore/verify");

const [, , file, key] = process.argv;
const bundle = bundleFromJSON(JSON.parse(readFileSync(file, "utf8")));
const publicKey = createPublicKey(readFileSync(key, "utf8"));
const trust = {
  certificateAuthorities: [],
  timestampAuthorities: [],
  tlogs: [],
  ctlogs: [],
  publicKey: (hint) => {
    console.error(`key ${hint}`);
    return { publicKey, validFor: () => true };
  },
};
// No transparency log and no timestamp: the key itself is what is trusted.
const verifier = new Verifier(trust, { ctlogThreshold: 0, tlogThreshold: 0, timestampThreshold: 0, tsaThreshold: 0 });
verifier.verify(toSignedEntity(bundle));
process.stdout.write(bundle.content.dsseEnvelope.payload.toString("utf8"));
