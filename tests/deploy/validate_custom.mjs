// Checks objects of operators against the schemas of their definitions: node validate_custom.mjs MODULES < objects.json
import { readFileSync } from "node:fs";

const modules = process.argv[2];
const folders = {
  "monitoring.coreos.com/v1": "prometheus-operator/monitoring.coreos.com/v1",
  "keda.sh/v1alpha1": "keda/keda.sh/v1alpha1",
  "gateway.networking.k8s.io/v1": "gateway-api/gateway.networking.k8s.io/v1",
};
for (const object of JSON.parse(readFileSync(0, "utf8"))) {
  const found = await import(`${modules}/@kubernetes-models/${folders[object.apiVersion]}/${object.kind}.js`);
  new found[object.kind](object).validate();
  console.log(object.kind);
}
