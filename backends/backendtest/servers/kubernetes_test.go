//go:build linux

package servers

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"testing"
)

func TestAnAPIServerIsItsTestsAlone(t *testing.T) {
	var pids []int
	t.Run("a test", func(t *testing.T) {
		k := StartKubernetes(t, KubernetesOptions{Controllers: []string{"serviceaccount-controller"}})
		pids = []int{k.Pid(), k.Controller.Pid(), k.Etcd.Nodes[0].Pid()}

		var namespaces struct {
			Items []struct{ Metadata struct{ Name string } }
		}
		Within(t, patience, "there is a namespace", func() error {
			if k.Do(http.MethodGet, "/api/v1/namespaces", nil, &namespaces); len(namespaces.Items) == 0 {
				return errors.New("none yet")
			}
			return nil
		})
		if out, err := k.Kubectl("get", "namespaces", "--output=name").CombinedOutput(); err != nil || !bytes.Contains(out, []byte("namespace/")) {
			t.Errorf("kubectl: got %v and %q, want namespaces", err, out)
		}

		// Nobody gets in without the token, and those who know another authority do not even ask.
		answer, err := k.client.Get(k.url(k.Port, "/api/v1/namespaces"))
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if answer.StatusCode != http.StatusUnauthorized {
			t.Errorf("without the token: got %s, want 401", answer.Status)
		}
		stranger := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: k.trust(MakeCertificates(t).CA).RootCAs}}}
		defer stranger.CloseIdleConnections()
		answer, err = stranger.Get(k.url(k.Port, "/readyz"))
		if err == nil {
			answer.Body.Close()
		}
		if _, unknown := errors.AsType[*tls.CertificateVerificationError](err); !unknown {
			t.Errorf("with another authority: got %v, want its certificate refused", err)
		}

		// The token is in files of its owner, and neither in a log nor where every process can read it.
		for _, name := range []string{"tokens.csv", "kubeconfig", "accounts.key"} {
			info, err := os.Stat(filepath.Join(k.Dir, name))
			if err != nil {
				t.Fatal(err)
			}
			if got := info.Mode(); got != fs.FileMode(0o600) {
				t.Errorf("%s: got mode %v, want 0600", name, got)
			}
		}
		for what, p := range map[string]*Process{"the server": k.Process, "the controllers": k.Controller} {
			arguments, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.Pid()))
			if err != nil {
				t.Fatal(err)
			}
			if bytes.Contains(append(arguments, p.Log()...), []byte(k.token)) {
				t.Errorf("the token is in the arguments or the log of %s", what)
			}
		}
	})
	for _, pid := range pids {
		if alive(pid) {
			t.Errorf("pid %d is alive after its test", pid)
		}
	}
}
