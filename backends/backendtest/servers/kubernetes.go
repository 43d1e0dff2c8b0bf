//go:build linux

package servers

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// NeedKubernetes is the need of an API server of Kubernetes, its controllers and kubectl, for [Require].
const NeedKubernetes = "kubernetes"

// KubernetesOptions are what makes a control plane special.
type KubernetesOptions struct {
	// Controllers are the names of those that run, of kube-controller-manager. Without one nothing is made of what is stored.
	Controllers []string
}

// Kubernetes is the control plane of a cluster that has no nodes: an etcd, the API server, and controllers. Pods are stored and nobody runs
// them: a test that wants to is the kubelet, and writes their status.
type Kubernetes struct {
	*Process // the API server

	Etcd       *EtcdCluster
	Controller *Process // nil without controllers
	Dir        string
	Port       int
	Kubeconfig string // path of a file that is its owner's alone: the token in it may do everything

	t       testing.TB
	kubectl string
	token   string
	client  *http.Client
}

// Kubectl returns the path of the command line client, built like the server.
func Kubectl(t testing.TB) string {
	t.Helper()
	return built(t, NeedKubernetes, "kubernetes", "k8s.io/kubernetes/cmd/kubectl", "kubectl")
}

// StartKubernetes starts a control plane and returns when it is ready. Clients are told apart by tokens alone, of which there is one.
//
// Source: kube-apiserver --help, 1.37: the token file is token,user,uid,"groups"; system:masters may do everything.
func StartKubernetes(t testing.TB, o KubernetesOptions) *Kubernetes {
	t.Helper()
	k := &Kubernetes{t: t, kubectl: Kubectl(t)}
	server := built(t, NeedKubernetes, "kubernetes", "k8s.io/kubernetes/cmd/kube-apiserver", "kube-apiserver")
	controllers := ""
	if len(o.Controllers) > 0 {
		controllers = built(t, NeedKubernetes, "kubernetes", "k8s.io/kubernetes/cmd/kube-controller-manager", "kube-controller-manager")
	}
	k.Etcd, k.Dir, k.Port = StartEtcd(t, 1, EtcdOptions{}), t.TempDir(), FreePort(t, 0)
	made := MakeCertificates(t)
	k.client = &http.Client{Transport: &http.Transport{TLSClientConfig: k.trust(made.CA), MaxIdleConnsPerHost: 8}}
	t.Cleanup(k.client.CloseIdleConnections)
	k.token = rand.Text()
	tokens := k.file("tokens.csv", []byte(k.token+`,test,test,"system:masters"`+"\n"))
	private, public := k.accountKeys()
	k.Kubeconfig = k.file("kubeconfig", k.config(made.CA))
	k.Process = Start(t, Command{
		Name: "kube-apiserver", Path: server, Dir: k.Dir, Ports: []int{k.Port},
		Args: []string{
			"--etcd-servers=http://" + k.Etcd.Nodes[0].Addr(), "--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.0.0.0/24",
			"--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--secure-port=" + strconv.Itoa(k.Port),
			"--tls-cert-file=" + made.Cert, "--tls-private-key-file=" + made.Key, "--profiling=false",
			"--anonymous-auth=false", "--authorization-mode=RBAC", "--token-auth-file=" + tokens,
			"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + public, "--service-account-signing-key-file=" + private,
		},
		Ready: func(ctx context.Context) error { return k.healthy(ctx, k.Port, "/readyz") },
	})
	if controllers == "" {
		return k
	}
	port := FreePort(t, 0)
	k.Controller = Start(t, Command{
		Name: "kube-controller-manager", Path: controllers, Dir: k.Dir, Ports: []int{port},
		Args: []string{
			"--kubeconfig=" + k.Kubeconfig, "--controllers=" + strings.Join(o.Controllers, ","), "--leader-elect=false",
			// It asks before each step of a Job: a test makes more of them at once than a cluster does.
			"--kube-api-qps=500", "--kube-api-burst=500",
			"--bind-address=127.0.0.1", "--secure-port=" + strconv.Itoa(port), "--tls-cert-file=" + made.Cert, "--tls-private-key-file=" + made.Key,
		},
		Ready: func(ctx context.Context) error { return k.healthy(ctx, port, "/healthz") },
	})
	return k
}

// trust is how the kit and kubectl know the server: by the test's authority, and by no other.
func (k *Kubernetes) trust(ca string) *tls.Config {
	k.t.Helper()
	text, err := os.ReadFile(ca)
	if err != nil {
		k.t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(text)
	return &tls.Config{RootCAs: pool}
}

// file writes a file that nobody else can read.
func (k *Kubernetes) file(name string, text []byte) string {
	k.t.Helper()
	path := filepath.Join(k.Dir, name)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		k.t.Fatal(err)
	}
	return path
}

// accountKeys makes the pair with which the server signs the tokens of service accounts.
func (k *Kubernetes) accountKeys() (private, public string) {
	k.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		k.t.Fatal(err)
	}
	secret, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		k.t.Fatal(err)
	}
	open, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		k.t.Fatal(err)
	}
	return k.file("accounts.key", pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: secret})),
		k.file("accounts.pub", pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: open}))
}

// config is the configuration of a client; JSON is YAML, too.
func (k *Kubernetes) config(ca string) []byte {
	k.t.Helper()
	type named map[string]any
	b, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "test",
		"clusters": []named{{"name": "test", "cluster": named{"server": k.url(k.Port, ""), "certificate-authority": ca}}},
		"users":    []named{{"name": "test", "user": named{"token": k.token}}},
		"contexts": []named{{"name": "test", "context": named{"cluster": "test", "user": "test"}}},
	})
	if err != nil {
		k.t.Fatal(err)
	}
	return b
}

func (k *Kubernetes) url(port int, path string) string {
	return "https://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) + path
}

func (k *Kubernetes) healthy(ctx context.Context, port int, path string) error {
	_, err := k.send(ctx, http.MethodGet, k.url(port, path), nil)
	return err
}

// Kubectl is a call of the command line client, with all rights.
func (k *Kubernetes) Kubectl(args ...string) *exec.Cmd {
	c := exec.Command(k.kubectl, append([]string{"--kubeconfig=" + k.Kubeconfig, "--request-timeout=" + soon.String()}, args...)...)
	c.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + k.Dir, "LC_ALL=C"}
	return c
}

// Do sends a request, with all rights, and decodes the answer into a pointer, if there is one. A PATCH is a merge of JSON.
func (k *Kubernetes) Do(method, path string, body, answer any) {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	var text []byte
	var err error
	if body != nil {
		text, err = json.Marshal(body)
	}
	if err == nil {
		text, err = k.send(ctx, method, k.url(k.Port, path), text)
	}
	if err == nil && answer != nil {
		err = json.Unmarshal(text, answer)
	}
	if err != nil {
		k.t.Fatalf("%s %s: %v", method, path, err)
	}
}

func (k *Kubernetes) send(ctx context.Context, method, url string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+k.token)
	req.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		req.Header.Set("Content-Type", "application/merge-patch+json")
	}
	answer, err := k.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	got, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode/100 != 2 {
		err = fmt.Errorf("%s: %s", answer.Status, got)
	}
	return got, err
}
