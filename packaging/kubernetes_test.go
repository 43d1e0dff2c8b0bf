//go:build linux

package packaging

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/servers"
)

// pod is what we look at in a pod's template.
type pod struct {
	Spec struct {
		RestartPolicy                 string
		TerminationGracePeriodSeconds int
		InitContainers, Containers    []podContainer
		SecurityContext               struct{ RunAsUser, RunAsGroup, FSGroup int }
		Volumes                       []struct {
			Name   string
			Secret struct {
				SecretName  string
				DefaultMode int
			}
		}
	}
}

type podContainer struct {
	Name, Image     string
	Command, Args   []string
	SecurityContext struct {
		AllowPrivilegeEscalation, ReadOnlyRootFilesystem *bool
	}
	VolumeMounts []struct{ Name, MountPath string }
}

type jobSpec struct {
	PodFailurePolicy struct {
		Rules []struct {
			Action      string
			OnExitCodes *struct {
				ContainerName, Operator string
				Values                  []int
			}
		}
	}
	Template pod
}

type manifest struct {
	Kind       string
	Metadata   struct{ Name string }
	StringData map[string]string
	Spec       struct {
		jobSpec
		Replicas    int
		JobTemplate struct{ Spec jobSpec }
	}
}

// buildTool builds the program that knows the types of the API.
var buildTool = sync.OnceValues(func() (path string, err error) {
	path = filepath.Join(filepath.Dir(underlease), "manifests")
	c := exec.Command("go", "build", "-o", path, ".")
	c.Dir = "../testdata/tools/manifests"
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w: %s", err, out)
	}
	return path, nil
})

// made are the manifests as Kustomize makes them of a directory, if the types of the API take them.
func made(t *testing.T, dir string) (all []manifest, err error) {
	t.Helper()
	tool, err := buildTool()
	if err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	c := exec.Command(tool, dir)
	c.Stdout, c.Stderr = &out, &errs
	if err := c.Run(); err != nil {
		return nil, &exec.Error{Name: strings.TrimSpace(errs.String()), Err: err}
	}
	for dec := json.NewDecoder(&out); dec.More(); {
		var m manifest
		if err := dec.Decode(&m); err != nil {
			t.Fatal(err)
		}
		all = append(all, m)
	}
	return all, nil
}

// job is the spec of a Job, if it is one or makes some.
func (m manifest) job() jobSpec {
	if m.Kind == "CronJob" {
		return m.Spec.JobTemplate.Spec
	}
	return m.Spec.jobSpec
}

func TestTheManifestsAreWhatTheAPITakes(t *testing.T) {
	all, err := made(t, "kubernetes/base")
	if err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for _, m := range all {
		kinds = append(kinds, m.Kind)
	}
	slices.Sort(kinds)
	if want := []string{"CronJob", "Deployment", "Job", "Secret"}; !slices.Equal(kinds, want) {
		t.Errorf("got %q, want %q", kinds, want)
	}

	// It does refuse what is wrong.
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS("kubernetes/base")); err != nil {
		t.Fatal(err)
	}
	for _, wrong := range [][2]string{
		{"podFailurePolicy:", "podFailurePolicies:"},
		{"values: [69, 74]", "values: [none]"},
		{"terminationGracePeriodSeconds: 75", "terminationGracePeriodSeconds: 75s"},
	} {
		text := read(t, "kubernetes/base/cronjob.yaml")
		write(t, dir, map[string]string{"cronjob.yaml": replaced(t, text, wrong[0], wrong[1])})
		if _, err := made(t, dir); err == nil {
			t.Errorf("%q was taken, want it refused", wrong[1])
		}
	}
}

// What is ours to keep, whatever a server takes.
func TestTheManifestsFitTogether(t *testing.T) {
	all, err := made(t, "kubernetes/base")
	if err != nil {
		t.Fatal(err)
	}
	const grace = 10 * time.Second
	secrets := map[string]bool{}
	for _, m := range all {
		secrets[m.Metadata.Name] = secrets[m.Metadata.Name] || m.Kind == "Secret" && m.StringData["backend"] != ""
	}
	for _, m := range all {
		if m.Kind == "Secret" {
			continue
		}
		job, spec := m.job(), m.job().Template.Spec
		name := m.Kind + " " + m.Metadata.Name
		var names []string
		for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
			names = append(names, c.Name)
			if c.Image != "registry.example.org/app:1.0" {
				t.Errorf("%s: got the image %s, want the one that Kustomize puts in", name, c.Image)
			}
			if s := c.SecurityContext; s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem {
				t.Errorf("%s: %s may do more than it has to", name, c.Name)
			}
			drain := regexp.MustCompile(`--drain=(\S+)`).FindStringSubmatch(strings.Join(c.Args, " "))
			if c.Command[0] != "underlease" {
				continue
			}
			if drain == nil {
				t.Errorf("%s: %s has no --drain", name, c.Name)
				continue
			}
			d, err := time.ParseDuration(drain[1])
			if err != nil {
				t.Fatal(err)
			}
			if got := time.Duration(spec.TerminationGracePeriodSeconds) * time.Second; got < d+grace {
				t.Errorf("%s: got a termination grace period of %v, want the drain of %v and %v", name, got, d, grace)
			}
		}
		for _, v := range spec.Volumes {
			if !secrets[v.Secret.SecretName] || v.Secret.DefaultMode != 0o440 {
				t.Errorf("%s: got the Secret %q with mode %o, want one that is there, and 440", name, v.Secret.SecretName, v.Secret.DefaultMode)
			}
		}
		rules := job.PodFailurePolicy.Rules
		if (m.Kind == "Deployment") != (len(rules) == 0) {
			t.Errorf("%s: got %d rules of failures", name, len(rules))
		}
		// Source: the API reference of batch/v1, PodFailurePolicy: at most 20 rules, restartPolicy Never, ordered values without 0 for In.
		if len(rules) > 0 && (spec.RestartPolicy != "Never" || len(rules) > 20) {
			t.Errorf("%s: got %d rules and restartPolicy %s, want Never with podFailurePolicy", name, len(rules), spec.RestartPolicy)
		}
		taken := map[int]string{}
		for _, r := range rules {
			if r.OnExitCodes == nil {
				continue
			}
			v := r.OnExitCodes.Values
			if !slices.IsSorted(v) || slices.Contains(v, 0) || !slices.Contains(names, r.OnExitCodes.ContainerName) || r.OnExitCodes.Operator != "In" {
				t.Errorf("%s: the server would refuse %+v", name, r.OnExitCodes)
			}
			for _, n := range v {
				taken[n] = r.Action
			}
		}
		if len(rules) > 0 && (taken[74] != "Ignore" || taken[69] != "Ignore" || taken[78] != "FailJob" || taken[124] != "") {
			t.Errorf("%s: got the rules %v", name, taken)
		}
		if m.Kind == "Job" && taken[75] != "Ignore" {
			t.Errorf("%s: got %q for 75, want Ignore: nothing has run", name, taken[75])
		}
	}
}

// Each container of ours is run as the kubelet would: as process 1, read-only, as the pod's user, with the Secret in its volume.
func TestTheContainersOfTheManifestsRun(t *testing.T) {
	servers.Require(t, "namespaces", root())
	all, err := made(t, "kubernetes/base")
	if err != nil {
		t.Fatal(err)
	}
	redis := servers.StartRedis(t, servers.RedisOptions{Password: "its-secret?"})
	backend := "redis://:its-secret%3F@" + redis.Addr()
	dir := scratch(t, image{copies: [][2]string{{underlease, "/bin/underlease"}}}, "")
	for _, name := range []string{"report", "migrate"} {
		if err := os.Link(filepath.Join(dir, "program"), filepath.Join(dir, "bin", name)); err != nil {
			t.Fatal(err)
		}
	}
	ran := 0
	for _, m := range all {
		spec := m.job().Template.Spec
		for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
			if c.Command[0] != "underlease" {
				continue
			}
			ran++
			t.Run(m.Kind+" "+c.Name, func(t *testing.T) {
				redis.Do("FLUSHALL")
				s := spec.SecurityContext
				secretVolume(t, filepath.Join(dir, c.VolumeMounts[0].MountPath), "backend", backend+"\n", os.FileMode(spec.Volumes[0].Secret.DefaultMode), s.FSGroup)
				user := strconv.Itoa(s.RunAsUser) + ":" + strconv.Itoa(s.RunAsGroup)
				for range 2 { // the second one finds it done
					out, err := container(dir, user, slices.Concat(c.Command, c.Args)...).CombinedOutput()
					if err != nil {
						t.Fatalf("got %v and %q, want 0", err, out)
					}
					if strings.Contains(string(out), "secret") {
						t.Errorf("the password is in %q", out)
					}
				}
				keys := redis.Do("KEYS", "*")
				lease := c.Args[slices.Index(c.Args, "--")-1]
				if !strings.Contains(keys, lease) {
					t.Errorf("got the records %q, want one of %s", keys, lease)
				}
			})
		}
	}
	if ran != 3 {
		t.Errorf("got %d containers of ours, want those of the CronJob, the Job and the Deployment", ran)
	}
}

// secretVolume lays a Secret out as the kubelet does: files of root and the pod's group in a directory that a link names.
func secretVolume(t *testing.T, dir, name, text string, mode os.FileMode, group int) {
	t.Helper()
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	write(t, dir, map[string]string{"..2026_11_30/" + name: text})
	file := filepath.Join(dir, "..2026_11_30", name)
	for _, err := range []error{
		os.Chown(file, 0, group), os.Chmod(file, mode),
		os.Symlink("..2026_11_30", filepath.Join(dir, "..data")), os.Symlink("..data/"+name, filepath.Join(dir, name)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
}
