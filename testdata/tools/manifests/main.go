// Command manifests checks manifests of Kubernetes by the types of its API, strictly: an unknown field, a field that is there twice and a
// value of the wrong kind are errors.
//
//	manifests DIRECTORY...
//
// Each directory is one of Kustomize. What it makes is printed on standard output, as JSON, one object a line.
//
// What a server checks beyond that (which values go together, what is immutable) is not checked.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

func main() {
	for _, dir := range os.Args[1:] {
		if err := check(dir); err != nil {
			fmt.Fprintf(os.Stderr, "manifests: %s: %v\n", dir, err)
			os.Exit(1)
		}
	}
}

func check(dir string) error {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, appsv1.AddToScheme, batchv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	made, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		return err
	}
	for _, resource := range made.Resources() {
		text, err := resource.AsYAML()
		if err != nil {
			return err
		}
		object, kind, err := decoder.Decode(text, nil, nil)
		if err != nil {
			return fmt.Errorf("%s: %w", resource.CurId(), err)
		}
		object.GetObjectKind().SetGroupVersionKind(*kind)
		out, err := json.Marshal(object)
		if err != nil {
			return err
		}
		fmt.Println(string(out))
	}
	return nil
}
