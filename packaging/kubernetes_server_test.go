//go:build linux

package packaging

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/underlease/underlease/backends/backendtest/servers"
)

const base = "kubernetes/base"

// restricted makes a namespace that takes no pod which may do more than Kubernetes' standard "restricted" allows.
func restricted(k *servers.Kubernetes, name string) {
	k.Do(http.MethodPost, "/api/v1/namespaces", map[string]any{"metadata": map[string]any{"name": name, "labels": map[string]string{
		"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted",
	}}}, nil)
}

// objects are those that kubectl prints as JSON, one after another or as a list.
func objects(t *testing.T, text []byte) (all []map[string]any) {
	t.Helper()
	for dec := json.NewDecoder(bytes.NewReader(text)); dec.More(); {
		var o map[string]any
		if err := dec.Decode(&o); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		if o["kind"] != "List" {
			all = append(all, o)
			continue
		}
		for _, item := range o["items"].([]any) {
			all = append(all, item.(map[string]any))
		}
	}
	return all
}

// written is a call that prints, as JSON, what a server would be sent of a directory of Kustomize.
func written(dir string) []string {
	return []string{"create", "--dry-run=client", "--validate=ignore", "--output=json", "--kustomize=" + dir}
}

// lost says which fields of a manifest are not in what a server has made of it, or are others there. A server adds fields, and no elements.
func lost(path string, want, got any) (paths []string) {
	switch w := want.(type) {
	case map[string]any:
		g, _ := got.(map[string]any)
		for _, key := range slices.Sorted(maps.Keys(w)) {
			if text, ok := w[key].(map[string]any); ok && path == "Secret" && key == "stringData" {
				for name, value := range text { // is kept in another field, and not given back
					data, _ := g["data"].(map[string]any)
					paths = append(paths, lost(path+".data."+name, base64.StdEncoding.EncodeToString([]byte(value.(string))), data[name])...)
				}
				continue
			}
			paths = append(paths, lost(path+"."+key, w[key], g[key])...)
		}
	case []any:
		g, _ := got.([]any)
		if len(g) != len(w) {
			return []string{fmt.Sprintf("%s: got %d elements, want %d", path, len(g), len(w))}
		}
		for i := range w {
			paths = append(paths, lost(fmt.Sprintf("%s[%d]", path, i), w[i], g[i])...)
		}
	default:
		if got != want {
			return []string{fmt.Sprintf("%s: got %v, want %v", path, got, want)}
		}
	}
	return paths
}

// changed is the base with one line in one of its files for another.
func changed(t *testing.T, file, from, to string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(base)); err != nil {
		t.Fatal(err)
	}
	write(t, dir, map[string]string{file: replaced(t, read(t, filepath.Join(base, file)), from, to)})
	return dir
}

// A server knows more than the types do. UNDERLEASE_TEST_KUBECONFIG names one of yours, which is asked, and stores nothing, instead of one that
// is started here.
func TestAnAPIServerTakesTheManifests(t *testing.T) {
	var own *servers.Kubernetes
	kubectl := func(args ...string) *exec.Cmd { return exec.Command("kubectl", args...) } // knows whose by KUBECONFIG
	if config := os.Getenv("UNDERLEASE_TEST_KUBECONFIG"); config != "" {
		t.Setenv("KUBECONFIG", config)
	} else {
		own = servers.StartKubernetes(t, servers.KubernetesOptions{})
		restricted(own, "ours")
		kubectl = func(args ...string) *exec.Cmd { return own.Kubectl(append([]string{"--namespace=ours"}, args...)...) }
	}
	made, err := kubectl(written(base)...).Output()
	if err != nil {
		t.Fatal(err)
	}
	// compare says what is lost of a manifest.
	compare := func(t *testing.T, text, stored []byte) (all []string) {
		got := map[string]any{}
		for _, o := range objects(t, stored) {
			got[o["kind"].(string)] = o
		}
		for _, o := range objects(t, text) {
			kind := o["kind"].(string)
			all = append(all, lost(kind, o, got[kind])...)
		}
		return all
	}
	ask := func(validate, dir string) ([]byte, string, error) {
		var out, errs bytes.Buffer
		c := kubectl("create", "--dry-run=server", "--validate="+validate, "--output=json", "--kustomize="+dir)
		c.Stdout, c.Stderr = &out, &errs
		err := c.Run()
		return out.Bytes(), errs.String(), err
	}

	t.Run("it takes them as they are", func(t *testing.T) {
		out, said, err := ask("strict", base)
		if err != nil || own != nil && said != "" { // yours may have rules of its own
			t.Fatalf("got %v and %q, want them taken without a warning", err, said)
		}
		for _, l := range compare(t, made, out) {
			t.Error(l)
		}
	})

	for _, wrong := range []struct{ name, file, from, to, said string }{
		{"a pod that the kubelet runs again has no policy", "cronjob.yaml", "restartPolicy: Never", "restartPolicy: OnFailure", "only \"Never\" is supported when podFailurePolicy is specified"},
		{"success is no failure", "migration.yaml", "[69, 74, 75]", "[0, 69, 74]", "must not be 0"},
		{"codes are in order", "cronjob.yaml", "[69, 74]", "[74, 69]", "must be ordered"},
		{"no code twice", "cronjob.yaml", "[69, 74]", "[69, 69]", "Duplicate value: 69"},
		{"a rule names a container", "cronjob.yaml", "containerName: report", "containerName: reporter", "\"reporter\": must be one of the container or initContainer names"},
		{"no rule is empty", "migration.yaml", "onPodConditions:\n          - {type: DisruptionTarget, status: \"True\"}", "onPodConditions: []", "specifying one of OnExitCodes and OnPodConditions is required"},
		{"there is no hour 25", "cronjob.yaml", "10 1 * * *", "10 25 * * *", "end of range (25) above maximum (23)"},
		{"five fields", "cronjob.yaml", "10 1 * * *", "10 1 * *", "expected exactly 5 fields"},
		{"a zone that there is", "cronjob.yaml", "Etc/UTC", "Etc/Nowhere", "unknown time zone Etc/Nowhere"},
		{"no zone beside timeZone", "cronjob.yaml", "10 1 * * *", "TZ=UTC 10 1 * * *", "cannot use TZ or CRON_TZ in schedule"},
		{"a policy that there is", "cronjob.yaml", "Policy: Forbid", "Policy: Never", "Unsupported value: \"Never\""},
		{"a deadline is not negative", "migration.yaml", "activeDeadlineSeconds: 3600", "activeDeadlineSeconds: -1", "must be greater than or equal to 0"},
		{"a volume that there is", "cronjob.yaml", "{name: underlease, mountPath", "{name: nothing, mountPath", "Not found: \"nothing\""},
		{"a mode of files", "cronjob.yaml", "0440", "01777", "must be a number between 0 and 0777"},
		{"a user", "deployment.yaml", "runAsUser: 65532", "runAsUser: -1", "must be between 0 and 2147483647"},
		{"its own pods", "deployment.yaml", "labels: {app: app}", "labels: {app: other}", "`selector` does not match template `labels`"},
		{"a field that there is", "cronjob.yaml", "podFailurePolicy:", "podFailurePolicies:", "unknown field \"spec.jobTemplate.spec.podFailurePolicies\""},
	} {
		t.Run("it refuses what is wrong: "+wrong.name, func(t *testing.T) {
			if _, said, err := ask("strict", changed(t, wrong.file, wrong.from, wrong.to)); err == nil || !strings.Contains(said, wrong.said) {
				t.Errorf("got %v and %q, want it refused with %q", err, said, wrong.said)
			}
		})
	}

	t.Run("what it loses is found", func(t *testing.T) {
		dir := changed(t, "cronjob.yaml", "podFailurePolicy:", "podFailurePolicies:")
		text, err := kubectl(written(dir)...).Output()
		if err != nil {
			t.Fatal(err)
		}
		out, said, err := ask("ignore", dir)
		if err != nil {
			t.Fatalf("%v: %s", err, said)
		}
		if all := compare(t, text, out); len(all) != 1 || !strings.Contains(all[0], "podFailurePolicies") {
			t.Errorf("got %q lost, want podFailurePolicies", all)
		}
	})

	if own == nil {
		return // nothing is stored on a server that is not ours
	}

	t.Run("it keeps them as they are", func(t *testing.T) {
		var before []string
		for _, word := range []string{" created\n", " unchanged\n"} { // apply it as often as you like
			out, err := kubectl("apply", "--validate=strict", "--kustomize="+base).CombinedOutput()
			want := 4
			if word == " unchanged\n" {
				want = 3 // kubectl cannot tell of a Secret's stringData
			}
			if err != nil || strings.Count(string(out), word) != want || strings.Count(string(out), "\n") != 4 {
				t.Fatalf("got %v and %q, want four lines, and %d that end in %q", err, out, want, word)
			}
			out, err = kubectl("get", "--output=json", "--kustomize="+base).Output()
			if err != nil {
				t.Fatal(err)
			}
			for _, l := range compare(t, made, out) {
				t.Error(l)
			}
			var versions []string
			for _, o := range objects(t, out) {
				versions = append(versions, fmt.Sprint(o["kind"], o["metadata"].(map[string]any)["resourceVersion"]))
			}
			if before != nil && !slices.Equal(versions, before) {
				t.Errorf("got the versions %q, want %q: nothing was changed", versions, before)
			}
			before = versions
		}
	})

	t.Run("a new schema is a new name", func(t *testing.T) {
		out, err := kubectl("apply", "--kustomize="+changed(t, "migration.yaml", "schema-v3, --", "schema-v4, --")).CombinedOutput()
		if err == nil || !strings.Contains(string(out), "field is immutable") {
			t.Errorf("got %v and %q, want the change refused", err, out)
		}
		out, err = kubectl("apply", "--kustomize="+changed(t, "migration.yaml", "schema-v3", "schema-v4")).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "job.batch/schema-v4 created\n") {
			t.Errorf("got %v and %q, want another Job", err, out)
		}
	})

	t.Run("a pod that may do more is warned of", func(t *testing.T) {
		_, said, _ := ask("strict", changed(t, "migration.yaml", "capabilities: {drop: [ALL]}", "privileged: false"))
		if !strings.Contains(said, "would violate PodSecurity") {
			t.Errorf("got %q, want a warning", said)
		}
	})
}
