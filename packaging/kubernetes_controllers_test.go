//go:build linux

package packaging

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/servers"
)

// storedPod is a pod, with what a kubelet would look at.
type storedPod struct {
	Metadata struct {
		Name, CreationTimestamp string
		Labels                  map[string]string
	}
	pod
}

// storedJob is a Job, with what its controller has made of it.
type storedJob struct {
	Status struct {
		Active, Failed int
		Conditions     []struct{ Type, Status, Reason string }
	}
}

// condition returns the reason of a condition that holds.
func (j storedJob) condition(kind string) (reason string, holds bool) {
	for _, c := range j.Status.Conditions {
		if c.Type == kind && c.Status == "True" {
			return c.Reason, true
		}
	}
	return "", false
}

// cluster is a control plane, and the kubelet is the test.
type cluster struct{ *servers.Kubernetes }

// namespace makes one in which pods can be made, and returns the paths of its Jobs and of its pods.
func (c cluster) namespace(t *testing.T, name string) (jobs, pods string) {
	t.Helper()
	restricted(c.Kubernetes, name)
	path := "/api/v1/namespaces/" + name
	if !within(patience, func() bool {
		var accounts struct{ Items []any }
		c.Do(http.MethodGet, path+"/serviceaccounts", nil, &accounts)
		return len(accounts.Items) > 0
	}) {
		t.Fatal("there is no service account for pods")
	}
	return "/apis/batch/v1/namespaces/" + name + "/jobs", path + "/pods"
}

// podsOf returns the pods by the name of their Job, first made first.
func (c cluster) podsOf(pods string) map[string][]storedPod {
	var all struct{ Items []storedPod }
	c.Do(http.MethodGet, pods, nil, &all)
	slices.SortStableFunc(all.Items, func(a, b storedPod) int {
		return strings.Compare(a.Metadata.CreationTimestamp, b.Metadata.CreationTimestamp)
	})
	by := map[string][]storedPod{}
	for _, p := range all.Items {
		job := p.Metadata.Labels["batch.kubernetes.io/job-name"]
		by[job] = append(by[job], p)
	}
	return by
}

// ended writes what a kubelet writes about a pod whose container has ended with a code, evicted or by itself.
//
// Source: the API reference of v1, PodStatus.
func (c cluster) ended(pods string, p storedPod, code int, evicted bool) {
	now := time.Now().UTC().Format(time.RFC3339)
	phase, reason := "Failed", "Error"
	if code == 0 {
		phase, reason = "Succeeded", "Completed"
	}
	status := map[string]any{"phase": phase, "containerStatuses": []any{map[string]any{
		"name": p.Spec.Containers[0].Name, "image": p.Spec.Containers[0].Image, "imageID": "", "ready": false, "restartCount": 0,
		"state": map[string]any{"terminated": map[string]any{"exitCode": code, "reason": reason, "startedAt": p.Metadata.CreationTimestamp, "finishedAt": now}},
	}}}
	if evicted {
		status["conditions"] = []any{map[string]any{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "lastTransitionTime": now}}
	}
	c.Do(http.MethodPatch, pods+"/"+p.Metadata.Name+"/status", map[string]any{"status": status}, nil)
}

// meant is what the page says of each code: for a CronJob and for a migration.
func meant(t *testing.T) map[int][2]string {
	t.Helper()
	all := map[int][2]string{}
	for _, row := range regexp.MustCompile(`(?m)^\| ([0-9][0-9, ]*|any other) \|[^|]*\| ([^|]*) \| ([^|]*) \|$`).FindAllStringSubmatch(read(t, "kubernetes/README.md"), -1) {
		for code := range strings.SplitSeq(strings.Replace(row[1], "any other", "1", 1), ", ") {
			n, err := strconv.Atoi(code)
			if err != nil {
				t.Fatal(err)
			}
			all[n] = [2]string{row[2], row[3]}
		}
	}
	return all
}

// The controllers of Kubernetes make Jobs and pods of the manifests. Nobody runs the pods: the test says how each has ended.
func TestTheControllersDoWhatThePageSays(t *testing.T) {
	c := cluster{servers.StartKubernetes(t, servers.KubernetesOptions{Controllers: []string{
		"cronjob-controller", "deployment-controller", "job-controller", "replicaset-controller", "serviceaccount-controller",
	}})}
	t.Run("for each exit code", c.codes)
	t.Run("and Forbid does not see a Job made by hand", c.byHand)
}

func (c cluster) codes(t *testing.T) {
	jobs, pods := c.namespace(t, "codes")
	if out, err := c.Kubectl("--namespace=codes", "apply", "--kustomize="+base).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	made, err := c.Kubectl(written(base)...).Output()
	if err != nil {
		t.Fatal(err)
	}
	specs := map[string]any{} // of Jobs
	for _, o := range objects(t, made) {
		switch spec, _ := o["spec"].(map[string]any); o["kind"] {
		case "CronJob":
			specs["cronjob"] = spec["jobTemplate"].(map[string]any)["spec"]
		case "Job":
			specs["migration"] = spec
		}
	}

	const evicted = 137 // by SIGKILL, and the pod says why
	type one struct {
		name, want string
		code       int
	}
	var all []one
	rows := meant(t)
	if len(rows) != 11 {
		t.Fatalf("got %d codes on the page, want 11: %v", len(rows), rows)
	}
	for code, row := range rows {
		all = append(all, one{fmt.Sprintf("cronjob-%d", code), row[0], code}, one{fmt.Sprintf("migration-%d", code), row[1], code})
	}
	all = append(all, one{"cronjob-evicted", "Ignore", evicted}, one{"migration-evicted", "Ignore", evicted})
	all = slices.DeleteFunc(all, func(o one) bool { return strings.HasPrefix(o.want, "does not come") })
	for _, o := range all {
		kind, _, _ := strings.Cut(o.name, "-")
		c.Do(http.MethodPost, jobs, map[string]any{"metadata": map[string]any{"name": o.name}, "spec": specs[kind]}, nil)
	}
	firsts := map[string]string{}
	if !within(patience, func() bool {
		by := c.podsOf(pods)
		for _, o := range all {
			if p := by[o.name]; len(p) == 1 && firsts[o.name] == "" {
				firsts[o.name] = p[0].Metadata.Name
				c.ended(pods, p[0], o.code, o.code == evicted)
			}
		}
		return len(firsts) == len(all)
	}) {
		t.Fatalf("got the pods of %d Jobs, want %d", len(firsts), len(all))
	}
	for _, o := range all {
		var job storedJob
		var tries int
		settled := within(patience, func() bool {
			c.Do(http.MethodGet, jobs+"/"+o.name, nil, &job)
			tries = len(c.podsOf(pods)[o.name])
			_, complete := job.condition("Complete")
			_, failed := job.condition("Failed")
			return complete || failed || tries > 1 && job.Status.Active == 1
		})
		if !settled {
			t.Errorf("%s: got %+v and %d tries, want it ended or tried again", o.name, job.Status, tries)
			continue
		}
		_, complete := job.condition("Complete")
		reason, failed := job.condition("Failed")
		got := fmt.Sprintf("complete %t, failed %t %s, counted %d, tries %d", complete, failed, reason, job.Status.Failed, tries)
		var want string
		switch word, _, _ := strings.Cut(o.want, " "); strings.TrimRight(word, ":,") {
		case "Complete":
			want = "complete true, failed false , counted 0, tries 1"
		case "Ignore":
			want = "complete false, failed false , counted 0, tries 2"
		case "counts":
			want = "complete false, failed false , counted 1, tries 2"
		case "FailJob":
			want = "complete false, failed true PodFailurePolicy, counted 1, tries 1"
		default:
			t.Errorf("%s: the test does not know what %q means", o.name, o.want)
			continue
		}
		if got != want {
			t.Errorf("%s: got %s; want %s", o.name, got, want)
		}
	}

	// Those of the files themselves: the Job of the migration, and three replicas that begin with it.
	by := c.podsOf(pods)
	if got := len(by["schema-v3"]); got != 1 {
		t.Errorf("got %d pods of the migration, want 1", got)
	}
	replicas := 0
	for _, p := range by[""] {
		if p.Metadata.Labels["app"] == "app" && len(p.Spec.InitContainers) == 1 {
			replicas++
		}
	}
	if replicas != 3 {
		t.Errorf("got %d replicas with an init container, want 3", replicas)
	}
}

// byHand shows what the lease is for: two Jobs of one CronJob have a pod each at the same time, and one of them runs the command.
func (c cluster) byHand(t *testing.T) {
	servers.Require(t, "namespaces", root())
	redis := servers.StartRedis(t, servers.RedisOptions{Password: "its-secret?"})
	jobs, pods := c.namespace(t, "by-hand")
	kubectl := func(args ...string) {
		t.Helper()
		if out, err := c.Kubectl(append([]string{"--namespace=by-hand"}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	kubectl("apply", "--kustomize="+changed(t, "secret.yaml", "redis://:PASSWORD@redis.default.svc:6379", "redis://:its-secret%3F@"+redis.Addr()))
	await := func(what string, f func(by map[string][]storedPod) bool) {
		t.Helper()
		if !within(patience, func() bool { return f(c.podsOf(pods)) }) {
			t.Fatalf("not in time: %s", what)
		}
	}

	// The root of the containers. The report ends when the test opens what it reads.
	dir := scratch(t, image{copies: [][2]string{{underlease, "/bin/underlease"}}}, "")
	source := t.TempDir()
	write(t, source, map[string]string{"main.go": `package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Println("reporting")
	if _, err := os.ReadFile("/end"); err != nil {
		panic(err)
	}
}
`})
	build := exec.Command("go", "build", "-o", filepath.Join(dir, "bin", "report"), "main.go")
	build.Dir, build.Env = source, append(os.Environ(), "CGO_ENABLED=0", "GO111MODULE=off")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
	end := filepath.Join(dir, "end")
	if err := syscall.Mkfifo(end, 0o644); err != nil {
		t.Fatal(err)
	}
	laid := false
	runs := func(p storedPod) (*exec.Cmd, *words) {
		t.Helper()
		spec := p.Spec
		if !laid {
			var secret struct{ Data map[string][]byte }
			c.Do(http.MethodGet, "/api/v1/namespaces/by-hand/secrets/"+spec.Volumes[0].Secret.SecretName, nil, &secret)
			secretVolume(t, filepath.Join(dir, spec.Containers[0].VolumeMounts[0].MountPath), "backend", string(secret.Data["backend"]),
				os.FileMode(spec.Volumes[0].Secret.DefaultMode), spec.SecurityContext.FSGroup)
			laid = true
		}
		out := &words{}
		user := fmt.Sprintf("%d:%d", spec.SecurityContext.RunAsUser, spec.SecurityContext.RunAsGroup)
		run := container(dir, user, slices.Concat(spec.Containers[0].Command, spec.Containers[0].Args)...)
		run.Stdout, run.Stderr = out, out
		if err := run.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = run.Process.Kill() }) // after Wait it says that there is none
		return run, out
	}

	kubectl("create", "job", "by-hand", "--from=cronjob/nightly-report")
	var hand, night storedPod
	await("a pod of the Job made by hand", func(by map[string][]storedPod) bool {
		if len(by["by-hand"]) == 1 {
			hand = by["by-hand"][0]
		}
		return len(by["by-hand"]) == 1
	})
	first, said := runs(hand)
	waitFor(t, said, "reporting")

	// It is night: the time of day is the test's, and the controller thinks that it has slept.
	cronjob := strings.Replace(jobs, "/jobs", "/cronjobs/nightly-report", 1)
	c.Do(http.MethodPatch, cronjob, map[string]any{"spec": map[string]any{"schedule": "* * * * *"}}, nil)
	c.Do(http.MethodPatch, cronjob+"/status", map[string]any{"status": map[string]any{"lastScheduleTime": time.Now().Add(-5 * time.Minute).UTC().Format(time.RFC3339)}}, nil)
	name := ""
	await("a pod of the controller's Job", func(by map[string][]storedPod) bool {
		for job, p := range by {
			if strings.HasPrefix(job, "nightly-report-") {
				name, night = job, p[0]
			}
		}
		return name != ""
	})
	for _, job := range []string{"by-hand", name} {
		var j storedJob
		await(job+" is active", func(map[string][]storedPod) bool {
			c.Do(http.MethodGet, jobs+"/"+job, nil, &j)
			return j.Status.Active == 1
		})
	}
	var cron struct {
		Spec   struct{ ConcurrencyPolicy string }
		Status struct{ Active []struct{ Name string } }
	}
	await("the CronJob knows a Job", func(map[string][]storedPod) bool {
		c.Do(http.MethodGet, cronjob, nil, &cron)
		return len(cron.Status.Active) > 0
	})
	if cron.Spec.ConcurrencyPolicy != "Forbid" || len(cron.Status.Active) != 1 || cron.Status.Active[0].Name != name {
		t.Errorf("got %+v, want Forbid, and %s active beside the one made by hand, of which it does not know", cron, name)
	}

	second, busy := runs(night)
	if err := second.Wait(); err != nil || strings.Contains(busy.String(), "reporting") {
		t.Errorf("the second pod: got %v and %q, want 0, and nothing run", err, busy)
	}
	c.ended(pods, night, code(second), false)
	// Nobody waits for a reader that is gone.
	f, err := os.OpenFile(end, os.O_WRONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatalf("the first one does not report any more: %v: %s", err, said)
	}
	f.Close()
	if err := first.Wait(); err != nil || strings.Count(said.String(), "reporting") != 1 {
		t.Errorf("the first pod: got %v and %q, want 0, and one report", err, said)
	}
	c.ended(pods, hand, code(first), false)
	for _, job := range []string{"by-hand", name} {
		await(job+" is complete", func(map[string][]storedPod) bool {
			var j storedJob
			c.Do(http.MethodGet, jobs+"/"+job, nil, &j)
			_, complete := j.condition("Complete")
			return complete
		})
	}
}
